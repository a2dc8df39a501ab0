"""Quantizing a 16-bit model to EXL3: calibration, bit allocation, and writing the directory."""
