#!/usr/bin/env bash
# Installs what tests need from Debian, if it is missing: a browser without windows and PostgreSQL for the labeling app, and
# the command ip, which makes two machines of one.
set -euo pipefail

missing=()
[ -x /usr/bin/chromium-headless-shell ] || missing+=(chromium-headless-shell fonts-liberation)
compgen -G "/usr/lib/postgresql/*/bin/initdb" > /dev/null || missing+=(postgresql)
command -v ip > /dev/null || missing+=(iproute2)
[ "${#missing[@]}" -gt 0 ] || exit 0

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq > /dev/null
apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
