//! Devices by their names: reads a target name, and builds the stack of devices that it names.
//!
//! Everything that opens or uses a device runs on a reactor. A target that is opened for writing has to be closed, so that a
//! volume is clean; a process that dies before leaves the volume as after a crash, and loses no flushed write.
//!
//! Nothing here prints, or knows a command line: what the user of a program should know is a [`StackError`], or goes to the
//! [`Program`].

pub mod below;
mod claims;
mod damage_view;
pub mod device_number;
mod drive;
mod error;
mod failures;
mod files;
pub mod filesystem;
/// Several targets as one device.
mod groups {
    pub(crate) mod mirror;
    pub(crate) mod multipath;
    pub(crate) mod replicas;
    pub(crate) mod stripe;
}
mod held;
mod holder;
pub mod identity;
mod info;
pub mod leaves;
mod linux;
mod mapped;
mod membership;
pub mod mounts;
mod occupied;
mod open;
mod opened;
mod ordinary;
mod out_of_sync;
pub mod owners;
mod program;
pub mod quantity;
pub mod range;
mod recorded;
mod remote;
mod salvage;
mod signature;
pub mod target;
mod target_identity;
mod whole;

pub use damage_view::DamageView;
pub use error::{Cause, StackError, printable, printable_lines};
pub use failures::{device_error, medium_error, open_error, resize_error, volume_error};
pub use files::{
    FileKind, OpenVolume, RAW_FILE, inspect, open_again, open_medium, open_shapeless, open_truncated, open_volume,
    remains_error, resize_volume,
};
pub use groups::mirror::MirrorOptions;
pub use groups::replicas::{CHANGING, OpenMirror};
pub use held::{Access, FileVolume, Usage, lost_answers_of};
pub use holder::process_text;
pub use info::{DriveInfo, OrdinaryTags, TargetInfo, protection_text};
pub use membership::{ReadOnly, bars_resizing};
pub use open::{Overwriting, Overwritten, create_mirror, open, open_for, overwrite, overwrite_device};
pub use opened::{Closer, MemberNames, OpenTarget, data_of};
pub use program::{Program, ReactorClock, config, note, on_reactor, set_program, start_error, warning};
pub use remote::{discover, exports};
pub use salvage::{Lost, Salvaged, damage, in_groups};
pub use signature::{FORMAT_BYTES, Signature, file_format, file_start, signature, wipe_end};
pub use target_identity::{Sameness, TargetIdentity, TargetLabel, member_of};
pub use whole::ByteView;
