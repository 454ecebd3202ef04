"""Programs that use reparax on real models."""
