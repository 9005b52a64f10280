# SGLang with Eyas beside it, whose plugin writes hidden states to a folder that the worker reads.
# Build from the checkout:  docker build --file docker/sglang.Dockerfile --tag eyas/lmsysorg/sglang:v0.5.23 .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
COPY pyproject.toml README.md LICENSE /build/
COPY eyas /build/eyas
COPY flows /build/flows
COPY tasks /build/tasks
COPY blocks /build/blocks
COPY deployments /build/deployments
RUN python3 -m pip install --no-cache-dir --no-deps /build
