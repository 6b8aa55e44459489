//! Structures of the NVM Express base and NVM command set specifications.
