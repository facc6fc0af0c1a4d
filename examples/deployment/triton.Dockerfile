# An image of `inflight serve` on NVIDIA's Triton container, for a GPU:
#
#   pip wheel --no-deps -w dist .
#   docker build -f examples/deployment/triton.Dockerfile -t inflight:triton .
#   docker run --rm --gpus all --read-only --tmpfs /tmp --shm-size=1g --cap-drop=ALL \
#       --security-opt=no-new-privileges --ulimit core=0 --ulimit nofile=65536 --stop-timeout 45 \
#       -v /srv/models:/models:ro -p 8000:8000 -p 8001:8001 -p 9000:9000 inflight:triton
#
# Containers from 24.12 on have Python 3.12, which this backend needs. The tests run against the
# tritonserver 2.51 of the other image: after a change of TRITON_TAG, run
# `docker run --rm --gpus all --shm-size=1g --entrypoint inflight inflight:triton doctor --self-test \
#      --repository /models` with the models mounted.
ARG TRITON_TAG=26.04-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

COPY constraints.txt dist/*.whl /tmp/dist/
# A virtual environment: the container's own packages may need numpy 2. The tests are of 2.51, which
# does not work with it, so inflight pins numpy below 2.
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/inflight \
    && /opt/inflight/bin/pip install --no-cache-dir -c /tmp/dist/constraints.txt \
        "$(echo /tmp/dist/*.whl)[cuda]" \
    && rm -r /tmp/dist \
    && useradd --system --uid 10001 --no-create-home inflight

USER 10001
ENV PATH=/opt/inflight/bin:${PATH} \
    XDG_RUNTIME_DIR=/tmp/run XDG_CACHE_HOME=/tmp/cache PYTHONDONTWRITEBYTECODE=1
EXPOSE 8000 8001 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
ENTRYPOINT ["inflight", "serve", "--host", "0.0.0.0", "--log-file", "/tmp/server.log", "--drain", "30"]
CMD ["--repository", "/models"]
