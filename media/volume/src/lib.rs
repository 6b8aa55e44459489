//! Protected volumes: crash-consistent protection information on media without metadata.
