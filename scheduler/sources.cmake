# All that plans, without the Python binding.
set(PAT_SCHEDULER_SOURCES prefix_forest.cpp batch_change.cpp forest_update.cpp packing.cpp subtree_tiles.cpp
  kv_split.cpp decode_plan.cpp pack_scheduler.cpp)
