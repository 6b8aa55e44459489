//! Protected volumes: crash-consistent protection information on media without metadata.

pub mod format;
