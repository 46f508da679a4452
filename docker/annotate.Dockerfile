# The labeling app. docker/compose.yaml starts it with PostgreSQL.
FROM python:3.12-slim-bookworm

RUN useradd --create-home --uid 10001 align && install -d -o align /data
WORKDIR /app
COPY constraints.txt ./
# Without CUDA: the app runs a model only to let labelers talk to it.
RUN pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY annotation_ui annotation_ui
COPY align align
COPY configs configs
COPY data data
COPY forms forms
RUN pip install --no-cache-dir -c constraints.txt '.[ui]'

USER 10001
VOLUME ["/data"]
EXPOSE 7860
HEALTHCHECK --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/healthz', timeout=5)"]
CMD ["align", "annotate", "--data-dir", "/data", "--host", "0.0.0.0"]
