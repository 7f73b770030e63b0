"""Memory that a training needs: what the estimate says beside what the allocator saw."""
