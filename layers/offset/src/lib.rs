//! A slice of another device.
