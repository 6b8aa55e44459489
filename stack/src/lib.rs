//! Devices by their names: reads a target name, and builds the stack of devices that it names.
//!
//! Everything that opens or uses a device runs on a reactor. A target that is opened for writing has to be closed, so that a
//! volume is clean; a process that dies before leaves the volume as after a crash, and loses no flushed write.
//!
//! A room is a file and the folder beside it:
//!
//! - [`target`]: target names. [`range`], [`quantity`]: what else is said in words.
//! - [`kernel`]: what the kernel knows: which block device lies on which, mounts, owners of blocks, users of a file.
//! - `opened`: a target that is open: its device and its parts, its clean close, and what is remembered of its blocks.
//! - `path`: opening a file, a volume, a drive or what is made of drives by its path; what lies there.
//! - `remote`: opening what another machine serves. `groups`: opening several targets as one device.
//! - `open`: whichever of these a name means. `whole`, `salvage`, [`filesystem`]: the content of what is open. [`rescue`]: what is left of a volume.
//!
//! Nothing here prints, or knows a command line: what the user of a program should know is a [`StackError`], or goes to the
//! [`Program`].

mod error;
mod failures;
pub mod filesystem;
/// Several targets as one device.
mod groups {
    pub(crate) mod membership;
    pub(crate) mod mirror;
    pub(crate) mod mirror_errors;
    pub(crate) mod multipath;
    pub(crate) mod replicas;
    pub(crate) mod stripe;
}
pub mod identity;
pub mod kernel;
mod open;
mod opened;
mod path;
mod program;
pub mod quantity;
pub mod range;
mod remote;
pub mod rescue;
mod salvage;
pub mod target;
mod whole;

pub use error::{Cause, StackError, is_out_of_descriptors, printable, printable_lines, shell_word};
pub use failures::{device_error, medium_error, open_error, resize_error, volume_error};
pub use groups::membership::{ReadOnly, bars_resizing};
pub use groups::mirror::MirrorOptions;
pub use groups::mirror_errors::CHANGING;
pub use groups::replicas::OpenMirror;
pub use kernel::holder::process_text;
pub use open::{
    Overwriting, Overwritten, create_mirror, open, open_for, overwrite, overwrite_blocks, overwrite_device,
};
pub use opened::closing::CloseLimit;
pub use opened::connections::{LostRemote, RemoteConnection};
pub use opened::damage_view::{DamageView, is_lost_list, lost_lists_text};
pub use opened::held::{Access, Usage, lost_answers_of};
pub use opened::info::{DriveInfo, OrdinaryTags, TargetInfo, protection_text};
pub use opened::lost_metadata::LostMetadata;
pub use opened::own_label::OwnLabel;
pub use opened::same_remote::RemoteDevices;
pub use opened::shards::FileVolume;
pub use opened::target_identity::{Sameness, TargetIdentity, TargetLabel, member_of};
pub use opened::{Closer, MemberNames, OpenTarget, data_of};
pub use path::files::{
    FileKind, OpenVolume, RAW_FILE, inspect, open_again, open_medium, open_shard_of, open_volume, remains_error,
    resize_volume, shards_keep_their_size,
};
pub use path::occupied::known_content;
pub use path::signature::{FORMAT_BYTES, Signature, file_format, file_start, signature, signature_places, wipe};
pub use program::{Program, ReactorClock, config, note, on_reactor, set_cores, set_program, start_error, warning};
pub use remote::{discover, exports};
pub use salvage::{Lost, Salvaged, damage, in_groups};
pub use whole::ByteView;
