//! A namespace of the NVM command set as a block device, however its commands are sent: by NVMe/TCP, or by the
//! passthrough of Linux.
//!
//! [`NamespaceProfile`] is the content of a namespace's Identify pages: geometry, limits, abilities, protection
//! information. A medium implements [`Namespace`], which executes single commands; [`requests`] makes them from block
//! requests, and a [`BadBlockSearch`] finds the blocks that a status is about.
//!
//! Invariants:
//! - Every field of a page is checked before use; no controller can make this crate panic, loop or grow.
//! - A block is reported bad only after a command for it alone has failed, or its tags were compared here.
//! - One table decides what the status of a command means.

mod bad_block_search;
mod checks;
mod copy;
mod pages;
mod profile;
pub mod requests;
mod status;

pub use bad_block_search::{BadBlockSearch, Probe, logged_block};
pub use checks::bad_blocks;
pub use pages::{Admin, IdentifyPages, NamespaceError, identify_controller, namespace_pages};
pub use profile::{
    CopyPlan, Metadata, MetadataSupport, NamespaceProfile, PiMode, PiSource, ProfileOptions, shares_crcs,
};
pub use status::{CommandContext, bad_block_cause, failure, is_not_supported, may_be_sent_again};

use sealblock_block::{BadBlock, Coverage, Error, Expectations, Outcome, RequestKind};
use sealblock_integrity::Sealed;
use sealblock_protocols_nvme::logs::ErrorEntry;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, ProtectionInfo};
use sealblock_protocols_nvme::{Command, Status};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

/// A command with its final completion.
pub trait CompletedCommand {
    /// The status of the completion.
    fn status(&self) -> Status;
}

/// Executes single commands on one namespace. Each returns its final completion, whatever the status; an error means
/// that there is none.
///
/// Commands are idempotent, so an implementation may send one again; a Copy is, as long as nobody changes its source
/// meanwhile.
pub trait Namespace {
    /// A command with its final completion, and what the implementation needs to find it in logs.
    type Completed: CompletedCommand;

    /// True if [`Namespace::is_logged_as`] knows the command by its queue and identifier. Otherwise a block named in
    /// the error log is only a hint: another program's command may have failed in the same way.
    const LOG_NAMES_COMMANDS: bool;

    /// The profile of the namespace.
    fn profile(&self) -> &NamespaceProfile;

    /// Executes one Read.
    ///
    /// # Errors
    /// As [`Namespace::execute_once`].
    fn read_once(
        &self,
        extent: Extent,
        protection: ProtectionInfo,
    ) -> impl Future<Output = Result<Self::Completed, Error>>;

    /// The blocks of a Read that succeeded, after the namespace's own check here ([`NamespaceProfile::own_checks`]),
    /// and if they are as expected.
    fn check_read(&self, extent: Extent, expectations: &Expectations, completed: Self::Completed) -> Outcome;

    /// Executes one Write of this data, which has tags exactly if the device shows tags.
    fn write_once(&self, command: BlockCommand, data: &Sealed) -> impl Future<Output = Result<Self::Completed, Error>>;

    /// Executes one Compare with this data, which has tags exactly if the namespace stores any.
    fn compare_once(
        &self,
        command: BlockCommand,
        data: &Sealed,
    ) -> impl Future<Output = Result<Self::Completed, Error>>;

    /// Executes a command without data.
    ///
    /// # Errors
    /// [`sealblock_block::ErrorKind::Absent`] if the command needs an extension that the controller does not offer any more: it
    /// is not sent then.
    fn execute_once(&self, command: IoCommand) -> impl Future<Output = Result<Self::Completed, Error>>;

    /// Executes one command that changes or copies these blocks and whose data are a list of ranges: Dataset Management
    /// or Copy.
    fn execute_with_ranges(
        &self,
        command: IoCommand,
        ranges: Slice,
        used: &[Extent],
    ) -> impl Future<Output = Result<Self::Completed, Error>>;

    /// Executes an admin command that reads `length_bytes`, on the controller that executed `completed`. It is a hint:
    /// `None` if it fails.
    fn read_page(
        &self,
        completed: &Self::Completed,
        command: Command,
        length_bytes: usize,
    ) -> impl Future<Output = Option<Buffer>>;

    /// True if an entry of the error log may be about this command; the status, the namespace and the block are
    /// compared elsewhere.
    fn is_logged_as(&self, completed: &Self::Completed, entry: &ErrorEntry) -> bool;

    /// Fills in the controller's expected and actual values of bad blocks, if it can report them.
    fn add_values(&self, completed: &Self::Completed, bad_blocks: &mut [BadBlock]) -> impl Future<Output = ()>;

    /// The error of a command that failed with a status that is not about blocks.
    fn failed(&self, kind: RequestKind, extent: Option<Extent>, completed: &Self::Completed) -> Error;

    /// Records a Write or Write Zeroes that is volatile until the next Flush.
    fn write_completed(&self, completed: &Self::Completed);

    /// The coverage of a Verify that was executed.
    fn verify_coverage(&self, extent: Extent, completed: &Self::Completed) -> Coverage;

    /// The coverage of Reads.
    fn read_coverage(&self, extent: Extent) -> Coverage;
}
