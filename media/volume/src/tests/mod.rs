//! The volume on a medium in memory. Crashes are the simulator's business; here is what holds without them.

mod allocation;
mod beside;
mod block_map;
mod closing;
mod corrupt;
mod fairness;
mod log;
mod neighbours;
mod recognition;
mod recovery;
mod remains;
mod requests;
mod resize;
mod runs;
pub(crate) mod setup;
