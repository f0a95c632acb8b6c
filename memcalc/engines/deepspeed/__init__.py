"""DeepSpeed: ZeRO's stages 0 to 3 and its pipelines."""
