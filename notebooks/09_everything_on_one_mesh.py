# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 Everything on one mesh
#
# **This notebook is not written yet.** It needs lesson 5, which puts data, tensor and pipeline parallelism together, and
# lesson 5 does not exist yet.
#
# It will ask: you have many ranks in several machines, and each rank belongs to three groups at once. Which axis goes
# where? The ranks then form a *device mesh*: a grid with one axis for each kind of parallelism. You will predict, run and
# see
#
# - why tensor parallelism belongs inside one machine, data parallelism between machines, and pipelines where links are slow,
# - what each key of a configuration does, and what a planner recommends for a model, a number of ranks and a memory size,
#   with its reasons,
# - the measured results of all combinations in one table, and how to go on to a real cluster.
#
# **Until then** you have all parts of the answer. [Notebook 06](06_zero_and_fsdp.ipynb) shows the memory that data
# parallelism needs, and how ZeRO shares it; [notebook 07](07_tensor_and_sequence_parallel.ipynb) what tensor parallelism
# sends in every layer; and [notebook 08](08_pipelines.ipynb) how little a pipeline sends, and for how long its ranks are
# idle. Ask of each: what does a rank send in a step, and who waits for it? The axis that sends the most gets the fastest
# links. [Notebook 10](10_when_it_breaks.ipynb) needs nothing of this one, so go on with it.
#
# ## Further reading
#
# - Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), sections 2 and 3: how the three kinds combine, and what to choose
# - [Device meshes in PyTorch](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh)
