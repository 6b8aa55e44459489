//! Subvolumes.
