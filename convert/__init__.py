"""From one layout to another: layouts, config tables, moves, plan and execution."""
