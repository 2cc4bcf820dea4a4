"""Shards and pictures, on disks and in object stores."""
