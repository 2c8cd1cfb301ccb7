# The API and the embedder in one image: `halflife serve` unless told otherwise.
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
# Packages first, the project last: a change in the code leaves the large layer as it is.
COPY locks/bootstrap.lock locks/image.lock locks/
RUN pip install --require-hashes --no-deps --only-binary :all: -r locks/bootstrap.lock \
 && uv venv --python /usr/local/bin/python3 /opt/halflife \
 && uv pip sync --python /opt/halflife --require-hashes --no-build locks/image.lock
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY scripts scripts
COPY es_mappings es_mappings
RUN uv pip install --python /opt/halflife --no-deps --offline .

FROM python:3.13-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --home-dir /nonexistent halflife \
 && install -d -o halflife -g halflife /var/cache/halflife
COPY --from=build /opt/halflife /opt/halflife
ENV PATH=/opt/halflife/bin:$PATH PYTHONUNBUFFERED=1 \
    HALFLIFE_HOST=0.0.0.0 HALFLIFE_PORT=8080 HALFLIFE_CACHE=/var/cache/halflife ORT_DISABLE_TELEMETRY=1
USER halflife
WORKDIR /var/cache/halflife
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"HALFLIFE_PORT\"]}/livez', timeout=4)"]
ENTRYPOINT ["halflife"]
CMD ["serve"]
