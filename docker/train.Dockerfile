# Training on NVIDIA GPUs. Build it in the root of the repository:
#   docker build -f docker/train.Dockerfile -t align:0.1.0 .
# The base has the CUDA compiler, with which DeepSpeed builds its kernels, in the version of torch's wheel (cu130).
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/align && useradd --create-home --uid 10001 align
ENV PATH=/opt/align/bin:$PATH

WORKDIR /workspace
COPY constraints.txt ./
# torch first: this layer is several gigabytes and changes only with its version.
RUN pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cu130
COPY pyproject.toml README.md LICENSE ./
COPY annotation_ui annotation_ui
COPY align align
COPY configs configs
COPY data data
COPY forms forms
# Editable: launch files and scripts are named by their paths in the repository, such as align/ppo/train.py.
RUN pip install --no-cache-dir -c constraints.txt -e '.[deepspeed,clean]' \
    && install -d -o align /workspace/runs /home/align/.cache

USER 10001
# Models, caches and runs outlive the container if /workspace/runs and /home/align/.cache are volumes.
VOLUME ["/workspace/runs", "/home/align/.cache"]
CMD ["align", "--help"]
