# This makes two images: `lessons`, which docker-compose.yaml builds, and `notebook`, the same with Jupyter:
#
#   docker build --target notebook -t workbook-notebook .
FROM python:3.11-slim AS pins
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*project['dependencies'], sep='\n', file=open('lessons.txt', 'w')); \
    print(*project['optional-dependencies']['notebook'], sep='\n', file=open('notebook.txt', 'w'))"

FROM python:3.11-slim AS libraries

# A container shapes its own link with tc, although nothing in it runs as root: this copy of tc, which only
# the learner's group may run, has the one capability that it needs. The capability takes effect only if the
# container has it, too (cap_add: [NET_ADMIN] in docker-compose.yaml).
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends iproute2 libcap2-bin \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home learner \
 && install -D -g learner -m 0750 "$(command -v tc)" /usr/local/libexec/link-tc \
 && setcap cap_net_admin+ep /usr/local/libexec/link-tc

WORKDIR /workbook
# A new volume that is mounted on checkpoints/ gets this folder's owner and mode. The group may write, for the notebook
# of a user with another number (NOTEBOOK_USER in docker-compose.yaml).
RUN install -d -o learner -g learner -m 0775 checkpoints && chown learner:learner . && chmod 0775 .

# Containers have no GPU, so by default torch comes from PyTorch's CPU index; empty means no extra index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# The exact version of torch; empty means the newest that pyproject.toml allows.
ARG TORCH=
# This comes before the code is copied, so that only a change of these pins installs them again.
COPY --from=pins lessons.txt /tmp/
RUN pip install --quiet --quiet --root-user-action=ignore --no-cache-dir \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} ${TORCH:+torch=="$TORCH"} -r /tmp/lessons.txt

# PYTHONPATH replaces `pip install -e .`, and puts our `comm` before Jupyter's package of that name.
ENV PYTHONPATH=/workbook PYTHONUNBUFFERED=1
ENTRYPOINT ["bash", "entrypoint.sh"]

FROM libraries AS lessons
COPY --chown=learner:learner . .
USER learner
# Or each container would compile the lessons when it starts. A mistake in one is told when it runs.
RUN python -m compileall -qq comm lab training zero low_communication *_parallel || true

FROM libraries AS notebook
COPY --from=pins notebook.txt /tmp/
RUN pip install --quiet --quiet --root-user-action=ignore --no-cache-dir -r /tmp/notebook.txt
COPY --chown=learner:learner . .
USER learner
