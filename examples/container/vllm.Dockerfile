# kconv beside vLLM, whose packages it leaves as they are: `kconv serve` checks a head, then starts vLLM with it.
#   docker build --file examples/container/vllm.Dockerfile --tag kconv-vllm .
#   docker run --rm --gpus all --publish 8000:8000 kconv-vllm serve org/my-head --target org/my-target
FROM vllm/vllm-openai:v0.32.0
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
ENTRYPOINT ["kconv"]
