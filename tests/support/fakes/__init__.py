"""Stand-ins for parts of SGLang that need a GPU, or that a test must observe.

| module | in place of | |---|---| | backends | arguments of attention backends: default backend, KV
pool, runner, batches | | cpu_kernels, speculation, draft_blocks | SGLang's GPU functions, in torch
| | cuda_graphs | CUDA graphs: a step reads the buffers of its capture | | driver | the CUDA driver,
for parts of SGLang that ask for one | | forks, forks_imports | spawned processes of an engine:
forks of one that has imported SGLang | | kv_files | the transfer of KV between servers | |
planted_errors, step_recorder | plug-ins that break or record an engine's steps | | plugins |
installation of such plug-ins |
"""
