# All that plans, without the Python binding.
set(PAT_SCHEDULER_SOURCES prefix_forest.cpp batch_change.cpp forest_update.cpp packing.cpp subtree_tiles.cpp
  split.cpp split_rule.cpp tile_list.cpp tile_cuts.cpp split_time.cpp split_writer.cpp even_split.cpp guided_split.cpp
  kv_split.cpp invariant_chunks.cpp decode_plan.cpp pack_scheduler.cpp)
