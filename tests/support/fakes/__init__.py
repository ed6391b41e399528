"""Stand-ins for parts of SGLang that a test cannot have, or must see into.

| module | in place of |
|---|---|
| backends | what SGLang hands to attention backends: default backend, KV pool, runner, batches |
| cpu_kernels, speculation, draft_blocks | its GPU functions, in torch |
| cuda_graphs | CUDA graphs: a step reads memory as it was captured |
| driver | the CUDA driver, for parts of SGLang that ask for one |
| forks, forks_imports | spawned processes of an engine: forks of one that has imported SGLang |
| kv_files | the transfer of KV between servers |
| planted_errors, step_recorder | plug-ins that break, or note, an engine's steps |
| plugins | how such plug-ins get into an engine |
"""
