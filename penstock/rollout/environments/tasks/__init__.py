"""Environments that ship with Penstock: arithmetic, calculator, math, reasoning-gym."""
