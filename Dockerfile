# surgeon on processors. docker build -t surgeon . && docker run --rm -v "$PWD:/data" surgeon inspect base-model
FROM python:3.11-slim AS build
WORKDIR /build
COPY requirements/build.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY surgeon surgeon
COPY plans plans
RUN python -m hatchling build -t wheel -d dist

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 surgeon
COPY requirements/torch.txt requirements/package.txt /opt/requirements/
# The versions that the tests pass with, every file checked by its hash; torch without CUDA, alone from its own index.
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: \
      --index-url https://download.pytorch.org/whl/cpu -r /opt/requirements/torch.txt \
 && pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r /opt/requirements/package.txt
COPY --from=build /build/dist /opt/dist
RUN pip install --no-cache-dir --no-deps --no-index /opt/dist/*.whl && pip check

# The folder of your checkpoints is mounted here; with another user id than 1000 add --user "$(id -u)".
ENV HF_HOME=/data/.hf
USER surgeon
WORKDIR /data
ENTRYPOINT ["surgeon"]
