# The image of `trainwright submit --to kubernetes`: python has Trainwright.
#
#     docker build --tag registry/trainwright:cuda .
#     docker build --tag registry/trainwright:cpu --build-arg DEVICE=cpu .

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# cuda or cpu; the wheels of torch bring CUDA's libraries, so both have the same base.
ARG DEVICE=cuda
ARG EXTRAS=adapters,evaluation,report
RUN python -m venv /opt/trainwright
ENV PATH=/opt/trainwright/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
# Before the source, so that a change of it keeps this layer.
RUN case "$DEVICE" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index=https://download.pytorch.org/whl/cu130 ;; \
        *) echo "DEVICE is cuda or cpu, not $DEVICE" >&2; exit 2 ;; \
    esac && \
    pip install --no-cache-dir --constraint constraints.txt --index-url "$index" torch
# The default extras' packages, by the hashes of their files; those of other extras follow by their versions alone.
COPY requirements.lock ./
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
# A compiler: torch.compile makes its kernels when a run begins.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends gcc g++ libc6-dev && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --create-home trainwright
COPY --from=build /opt/trainwright /opt/trainwright
ENV PATH=/opt/trainwright/bin:$PATH PYTHONUNBUFFERED=1
# A number, by which Kubernetes knows that it is not root.
USER 1000:1000
WORKDIR /home/trainwright
CMD ["trainwright", "--help"]
