//! Volumes in shards: several complete volumes of version 2, each in a window of one medium.
//!
//! Nothing in a volume knows that it is a shard. [`VolumeMedium`](crate::VolumeMedium) shows it its window as a medium;
//! all shards share one [`sealblock_block::SyncGroup`], so a sync of one may serve the others, and what fails in one
//! stops all of them. [`Shards`] has what they share and opens one after the other, on any core; [`open_shards`] opens
//! all of them on this core. Dealing blocks to shards is the task of a layer above, `layers/stripe`.
//!
//! Invariants: the superblock of the container never changes after [`create_shards`] has written it, which is its last
//! write; a shard is opened only if it has the identity, the layout and the protection that the container implies.

mod life;
mod summary;

pub use crate::medium::container_probe::{ContainerProbe, probe_shards};
pub use crate::medium::containers::find_first_shard;
pub use life::{OpenShards, Shards, create_container, create_shards, open_shards};
pub use summary::summarise;
