//! The volume on a medium in memory. Crashes are the simulator's business; here is what holds without them.

mod allocation;
mod beside;
mod closing;
mod damage;
mod recognition;
mod recovery;
mod requests;
mod setup;
