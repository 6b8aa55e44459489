//! Devices in memory that log every request, and every image that a power cut can leave of them.
//!
//! A [`Recorder`] has one or more devices with one [`Log`]. A test lets a filesystem work on them and calls
//! [`Recorder::mark`] whenever the filesystem has promised something ("fsync of a returned"). [`CrashStates`] then
//! enumerates what a power cut at each moment can leave on the devices. In each state the test checks the promises
//! whose marks lie before the cut.
//!
//! The rules of a device with a volatile write cache:
//!
//! - A Flush that succeeds makes durable the changes of *its* device that *completed before it started*, and no others.
//! - A Write or WriteZeroes with force unit access is durable when it completes.
//! - Of all other changes, completed or in flight, any subset survives, on each device independently. Each may survive
//!   in part, by sectors, unless the test declares writes of superblocks atomic.
//! - Requests that overlap in time reach the medium in any order.
//! - After a Flush has failed, what it should have made durable stays volatile, whatever later flushes report.
//! - A discarded block may have any content.
//! - A change that fails is stored wholly, in part or not at all, as the test demands; reads and states agree about it.
//!
//! What the enumerator does not know: the order in which a real device destages its cache. So the states are more than
//! those of any one device; a filesystem that survives all of them survives on each.
//!
//! # Use
//!
//! ```text
//! let before = Image::load(&path, BlockSize::B4096)?;
//! let recorder = Recorder::new(vec![before], Options { seed: 7, ..Options::default() });
//! let filesystem = open(recorder.devices()).await?;
//! filesystem.write("a", b"content").await?;
//! filesystem.fsync("a").await?;
//! recorder.mark("a is durable");
//!
//! let options = CrashOptions { superblocks: vec![64 << 10], ..CrashOptions::default() };
//! for state in CrashStates::new(recorder.log(), &options).iter() {
//!     let after = open(vec![state.images[0].device("after the power cut")]).await?;
//!     assert!(!state.has_mark("a is durable") || after.read("a").await? == b"content", "{state}");
//! }
//! ```
//!
//! Two power cuts in a row: a second [`Recorder`] begins with the images of a state.
//!
//! States that differ only in what nothing reads are judged once: [`Image::watched_device`] tells what was read of a
//! state, and [`Footprint::is_same_in`] whether another one has the same bytes there.
//!
//! For programs that read files, [`Image::save`] writes a sparse file. The kernel reads only the first superblock of a
//! device: mount only states with [`CrashOptions::atomic_superblocks`].
//!
//! Everything is a function of the log and a seed, so that a failing state can be made again from its index.

mod crash;
mod device;
mod faults;
mod footprint;
mod image;
mod log;
mod recorder;
mod survivors;
mod tear;

pub use crash::{CrashOptions, CrashState, CrashStates};
pub use faults::{FailedWrite, Fault, Repeat};
pub use footprint::{Footprint, Watched};
pub use image::{Content, Image, Piece};
pub use log::{Event, Log, Recorded, RequestId};
pub use recorder::{Discarded, Options, Recorder};
pub use survivors::Survivors;
