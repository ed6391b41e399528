# All that plans, without the Python binding.
set(PAT_SCHEDULER_SOURCES prefix_forest.cpp batch_change.cpp forest_update.cpp window_cut.cpp packer.cpp subtree_packer.cpp
  kv_split/split.cpp kv_split/tile_list.cpp kv_split/cut_finder.cpp kv_split/split_time_model.cpp
  kv_split/split_writer.cpp kv_split/stream_k_split.cpp kv_split/guided_self_scheduling.cpp kv_split/kv_split.cpp
  invariant_chunks.cpp decode_plan.cpp pack_scheduler.cpp)
