# surgeon on processors. docker build -t surgeon . && docker run --rm -v "$PWD:/data" surgeon inspect base-model
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 surgeon
WORKDIR /opt/surgeon
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY surgeon surgeon
COPY plans plans
# torch without CUDA; the versions that the tests pass with.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[report]"

# The folder of your checkpoints is mounted here; with another user id than 1000 add --user "$(id -u)".
ENV HF_HOME=/data/.hf
USER surgeon
WORKDIR /data
ENTRYPOINT ["surgeon"]
