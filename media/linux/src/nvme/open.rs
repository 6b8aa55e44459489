//! Opens a namespace: reads its pages, lowers its limits to those of the kernel, and tests with a command for one block
//! what the passthrough can transfer.

use std::path::Path;
use std::time::Duration;

use sealblock_block::{Ability, RequestKind};
use sealblock_integrity::{PiFormat, PiPosition};
use sealblock_media_nvme::{
    MetadataSupport, NamespaceProfile, PiMode, PiSource, ProfileOptions, bad_block_cause, namespace_pages,
};
use sealblock_protocols_nvme::identify::Lpa;
use sealblock_protocols_nvme::logs::EffectsLog;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_protocols_nvme::registers::{Capabilities, Version};
use sealblock_protocols_nvme::{IoOpcode, Status};
use sealblock_runtime_reactor::{File, NvmeQueue, Transfer, pool};
use sealblock_units::{BlockCount, Extent, Lba};

use super::commands::{Drive, Passthrough, has_command};
use super::error::OpenError;
use crate::block_codec::BlockCodec;
use crate::node::{KernelLimits, NodeKind, block_node};

/// Bytes of data in one transfer, the largest allocation of a reactor's arena; the gate splits larger requests.
const TRANSFER_BYTES: u32 = 1 << 20;

/// How a namespace is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Who makes tags, if the namespace has protection information.
    pub source: PiSource,
    /// Allow commands that change blocks. The caller must have exclusive use of the block device.
    pub write: bool,
    /// How long the kernel waits for one command before it aborts it.
    pub timeout: Duration,
}

impl Options {
    /// For reading, with tags made here, and the kernel's own time limit of 30 s.
    pub const READ: Options = Options { source: PiSource::Auto, write: false, timeout: Duration::from_secs(30) };
    /// The same for reading and writing.
    pub const WRITE: Options = Options { write: true, ..Options::READ };
}

/// The information of a drive about itself and of a namespace. Texts contain only printable characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NvmeInfo {
    /// MN: model.
    pub model: String,
    /// SN: serial number.
    pub serial: String,
    /// FR: firmware revision.
    pub firmware: String,
    /// VER: major, minor and tertiary version of the base specification; zeroes before 1.2.
    pub version: (u16, u8, u8),
    /// NSID.
    pub namespace: u32,
    /// The namespace's protection information, whoever makes it, and its position in the metadata.
    pub protection: Option<(PiFormat, PiPosition)>,
    /// Bytes of metadata of a block.
    pub metadata_bytes: usize,
    /// True if they follow the block's data, false if they are in a buffer of their own.
    pub metadata_interleaved: bool,
    /// Who makes the tags: [`PiSource::Host`] or [`PiSource::Target`]; `Auto` without tags.
    pub tags: PiSource,
    /// MDTS in bytes; `None` for no limit.
    pub max_transfer_bytes: Option<u64>,
    /// VSL in bytes; `None` for no limit or no such page.
    pub max_verify_bytes: Option<u64>,
    /// WZSL in bytes; `None` for no limit or no such page.
    pub max_write_zeroes_bytes: Option<u64>,
    /// The most bytes that the kernel transfers with one command, if known.
    pub kernel_transfer_bytes: Option<u64>,
    /// Writes are volatile until a Flush (VWC).
    pub volatile_write_cache: bool,
    /// The drive has Get LBA Status, which lists bad blocks.
    pub get_lba_status: bool,
    /// What the drive or the kernel reports to support, and then refuses.
    pub refused: Vec<String>,
}

/// A namespace of an NVMe drive, used through the kernel's passthrough.
pub struct NvmeNamespace {
    pub(crate) drive: Drive,
    pub(crate) info: NvmeInfo,
}

impl NvmeNamespace {
    /// Opens the namespace whose node `file` is; `path` is the path of the node, used to read sysfs.
    ///
    /// # Errors
    /// See [`OpenError`]; [`OpenError::is_only_the_way`] tells whether the drive can be used without passthrough.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn open(file: File, path: &Path, options: Options) -> Result<NvmeNamespace, OpenError> {
        let nsid = file.nvme_id().map_err(|error| OpenError::call_error("NVME_IOCTL_ID", error))?;
        let is_cached = NodeKind::of(path) == NodeKind::NvmeBlock;
        if is_cached {
            // Data written through the page cache are not on the drive yet.
            file.sync_data().await.map_err(|error| OpenError::call_error("a Flush", error))?;
        }
        let passthrough = Passthrough { file, timeout: options.timeout };
        // The kernel does not show CAP. It accepts only drives whose smallest page size is at most its own, 4096 bytes,
        // which is also the smallest in the specification; with MPSMIN 0 every limit is read as the smallest that it
        // can be.
        let pages = namespace_pages(&passthrough, Capabilities::from_bits(0), None, nsid).await?;
        let kernel = block_node(path).map(|block| KernelLimits::of(&block)).unwrap_or_default();
        let profile =
            ProfileOptions { source: options.source, metadata: MetadataSupport::Any, transfer_bytes: TRANSFER_BYTES };
        let mut profile = NamespaceProfile::of(nsid, &pages, &profile)?;
        let effects = match pages.controller.lpa.contains(Lpa::COMMANDS_SUPPORTED_AND_EFFECTS) {
            true => passthrough.effects().await,
            false => Ok(None),
        };
        let mut refused = match effects {
            Ok(log) => log.map_or_else(Vec::new, |log| believe(&mut profile, &log)),
            // Then the drive's other information about itself is used.
            Err(OpenError::Refused { what, status }) => vec![format!("{what}: {status}")],
            Err(error) => return Err(error),
        };
        refused.extend(cut(&mut profile, &kernel));
        profile.abilities.writable &= options.write;
        let codec = BlockCodec::new(&profile);
        let mut drive = Drive { passthrough, profile, codec, is_cached };
        refused.extend(drive.probe().await?);
        let text = |text: String| text.trim().to_owned();
        let (controller, version) = (&pages.controller, Version::from_bits(pages.controller.ver));
        let info = NvmeInfo {
            model: text(controller.mn.text()),
            serial: text(controller.sn.text()),
            firmware: text(controller.fr.text()),
            version: (version.major, version.minor, version.tertiary),
            namespace: nsid,
            protection: drive.profile.pi_mode.kept().map(|format| (format, pages.namespace.dps.position())),
            metadata_bytes: usize::from(pages.namespace.format().ms),
            metadata_interleaved: pages.namespace.flbas.extended,
            tags: match drive.profile.pi_mode {
                PiMode::None => PiSource::Auto,
                PiMode::Host(_) => PiSource::Host,
                PiMode::Target(_) => PiSource::Target,
            },
            max_transfer_bytes: drive.profile.max_transfer_bytes,
            max_verify_bytes: drive.profile.max_verify_bytes,
            max_write_zeroes_bytes: drive.profile.max_write_zeroes_bytes,
            kernel_transfer_bytes: kernel.transfer_bytes,
            volatile_write_cache: drive.profile.volatile_write_cache,
            get_lba_status: drive.profile.get_lba_status,
            refused,
        };
        Ok(NvmeNamespace { drive, info })
    }

    /// What the drive reports.
    pub fn info(&self) -> &NvmeInfo {
        &self.info
    }
}

/// Corrects a profile by the log of the commands that the drive supports; returns what ONCS lists and the log does not.
fn believe(profile: &mut NamespaceProfile, log: &EffectsLog) -> Vec<String> {
    let mut refused = Vec::new();
    // Some drives support Verify but do not set its bit in ONCS. In the opposite case a Verify is tried.
    if has_command(log, IoOpcode::Verify) {
        profile.abilities.set(RequestKind::Verify, Ability::Native);
    }
    // A Copy cannot be tried on blocks that are in use, so both have to list it, or the log alone.
    match (has_command(log, IoOpcode::Copy), profile.copy.is_some(), profile.abilities.get(RequestKind::Copy)) {
        (true, true, _) => profile.abilities.set(RequestKind::Copy, Ability::Native),
        (false, _, Ability::Native) => {
            profile.abilities.set(RequestKind::Copy, Ability::Absent);
            refused.push("copy: ONCS has it, and the Commands Supported and Effects log has not".to_owned());
        }
        _ => {}
    }
    refused
}

/// Lowers a profile to what the kernel can do; returns what the drive reports to support and the kernel does not use.
fn cut(profile: &mut NamespaceProfile, kernel: &KernelLimits) -> Vec<String> {
    let size = profile.geometry.block_size;
    let interleaved = if profile.metadata.is_interleaved { profile.metadata.bytes } else { 0 };
    if let Some(bytes) = kernel.transfer_bytes {
        let blocks = bytes / (size.bytes() + interleaved) as u64;
        let most = BlockCount::new(u32::try_from(blocks).unwrap_or(u32::MAX)).unwrap_or(BlockCount::ONE);
        let limits = &mut profile.geometry.limits;
        limits.max_transfer_blocks = limits.max_transfer_blocks.min(most);
    }
    let abilities = &mut profile.abilities;
    let mut refused = Vec::new();
    // The kernel knows the drives on which the command does harm, and sends them none.
    if kernel.write_zeroes_bytes == Some(0) && abilities.is_native(RequestKind::WriteZeroes) {
        abilities.set(RequestKind::WriteZeroes, Ability::Absent);
        abilities.unmap_zeroes = false;
        refused.push("write zeroes: the kernel sends this drive none".to_owned());
    }
    if kernel.discard_bytes == Some(0) && abilities.is_native(RequestKind::Discard) {
        abilities.set(RequestKind::Discard, Ability::Absent);
        refused.push("discard: the kernel sends this drive none".to_owned());
    }
    refused
}

impl Drive {
    /// Sends a Verify, or otherwise a Read, of the first block, so that nothing is offered that the kernel or the drive
    /// then refuses. A bad block counts as a success, too. Returns what is refused.
    async fn probe(&mut self) -> Result<Option<String>, OpenError> {
        let first = Extent::one(Lba::ZERO);
        let checks = self.profile.own_checks(first.start());
        let command = |protection| BlockCommand { protection, ..BlockCommand::new(first) };
        let is_answer = |status: Status| status.is_success() || bad_block_cause(status).is_some();
        let mut refused = None;
        if self.profile.abilities.is_native(RequestKind::Verify) {
            const WHAT: &str = "Verify";
            let verify = IoCommand::Verify(command(self.profile.read_checks(first, &checks, true).0));
            match self.send_probe(WHAT, verify, (Transfer::None, Transfer::None)).await? {
                status if is_answer(status) => return Ok(None),
                // Even if Verify fails, Read may work.
                status => {
                    self.profile.abilities.set(RequestKind::Verify, Ability::Absent);
                    refused = Some(format!("verify: the drive says that it has it, and answered {status}"));
                }
            }
        }
        const WHAT: &str = "Read";
        let read = IoCommand::Read(command(self.profile.read_checks(first, &checks, false).0));
        let room = self.codec.room(first, &pool());
        let memory = (Transfer::In(room.data), room.metadata.map_or(Transfer::None, Transfer::In));
        match self.send_probe(WHAT, read, memory).await? {
            status if is_answer(status) => Ok(refused),
            status => Err(OpenError::Refused { what: WHAT, status }),
        }
    }

    async fn send_probe(
        &self,
        what: &'static str,
        command: IoCommand,
        memory: (Transfer, Transfer),
    ) -> Result<Status, OpenError> {
        let command = command.encode(self.profile.nsid).expect("one block fits into a command");
        let (result, ..) = self.passthrough.send(NvmeQueue::Io, &command, memory, false).await;
        result.map_err(|error| OpenError::call_error(what, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::{GuardKind, ProtectionType};
    use sealblock_media_nvme::IdentifyPages;
    use sealblock_protocols_nvme::extensions::Extensions;
    use sealblock_protocols_nvme::identify::{
        Controller, Namespace as NamespacePage, NamespaceFormat, NvmNamespace, Oncs,
    };
    use sealblock_units::BlockSize;

    /// A namespace of 4096-byte blocks with this many bytes of metadata, of which the last eight are a tuple.
    fn profile(metadata_bytes: usize, extended: bool, source: PiSource) -> Result<NamespaceProfile, String> {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
        let wire = NamespaceFormat {
            block_size: BlockSize::B4096,
            metadata_bytes,
            extended,
            protection: Some((format, PiPosition::Last)),
            storage_tag_mask: 0,
        };
        let (mut namespace, mut nvm) =
            (NamespacePage { nsze: 1000, mssrl: 128, mcl: 128, ..NamespacePage::default() }, NvmNamespace::default());
        wire.describe(&mut namespace, &mut nvm);
        let oncs = Oncs::VERIFY | Oncs::COMPARE | Oncs::WRITE_ZEROES | Oncs::DATASET_MANAGEMENT;
        let pages = IdentifyPages {
            capabilities: Capabilities::from_bits(0),
            controller: Controller { mdts: 7, oncs, cdfs: 1, ..Controller::default() },
            nvm_controller: None,
            namespace,
            nvm_namespace: Some(nvm),
            independent: None,
            ids: Vec::new(),
            extensions: Extensions::NONE,
            bitmap_pages: 0,
            origin: None,
            identities: Vec::new(),
            content: None,
        };
        let options = ProfileOptions { source, metadata: MetadataSupport::Any, transfer_bytes: TRANSFER_BYTES };
        NamespaceProfile::of(1, &pages, &options).map_err(|error| error.to_string())
    }

    #[test]
    fn limits_are_cut_to_those_of_the_kernel() {
        let kernel = |bytes| KernelLimits { transfer_bytes: Some(bytes), ..KernelLimits::default() };
        for (bytes, extended, blocks) in
            [(128 << 10, false, 32), (128 << 10, true, 31), (1 << 30, true, 127), (1 << 30, false, 128), (100, true, 1)]
        {
            let mut profile = profile(8, extended, PiSource::Host).unwrap();
            assert_eq!(cut(&mut profile, &kernel(bytes)), Vec::<String>::new());
            assert_eq!(profile.geometry.limits.max_transfer_blocks.get(), blocks, "{bytes} {extended}");
        }
    }

    #[test]
    fn what_the_kernel_keeps_from_a_drive_is_not_sent_to_it() {
        let mut profile = profile(8, false, PiSource::Host).unwrap();
        let known = KernelLimits { write_zeroes_bytes: Some(4096), discard_bytes: Some(4096), transfer_bytes: None };
        assert!(cut(&mut profile, &known).is_empty());
        let ways = |profile: &NamespaceProfile, kinds: [RequestKind; 2]| kinds.map(|kind| profile.abilities.get(kind));
        let removing = [RequestKind::WriteZeroes, RequestKind::Discard];
        assert_eq!(ways(&profile, removing), [Ability::Native; 2]);
        let kept = KernelLimits { write_zeroes_bytes: Some(0), discard_bytes: Some(0), transfer_bytes: None };
        assert_eq!(cut(&mut profile, &kept).len(), 2);
        assert_eq!(ways(&profile, removing), [Ability::Absent; 2]);
        assert_eq!(ways(&profile, [RequestKind::Verify, RequestKind::Compare]), [Ability::Native; 2]);
    }

    #[test]
    fn the_log_of_commands_corrects_what_oncs_says() {
        let answer = |oncs: Oncs, log: EffectsLog| {
            let mut profile = profile(8, false, PiSource::Target).unwrap();
            for (kind, bit) in [(RequestKind::Verify, Oncs::VERIFY), (RequestKind::Copy, Oncs::COPY)] {
                profile.abilities.set(kind, Ability::native_if(oncs.contains(bit)));
            }
            let refused = believe(&mut profile, &log).len();
            (profile.abilities.get(RequestKind::Verify), profile.abilities.get(RequestKind::Copy), refused)
        };
        let both = EffectsLog::none().with_io(IoOpcode::Verify).with_io(IoOpcode::Copy);
        let (none, all) = (Oncs::NONE, Oncs::VERIFY | Oncs::COPY);
        assert_eq!(answer(none, EffectsLog::none()), (Ability::Absent, Ability::Absent, 0));
        assert_eq!(answer(none, both.clone()), (Ability::Native, Ability::Native, 0));
        assert_eq!(answer(all, both), (Ability::Native, Ability::Native, 0));
        assert_eq!(answer(all, EffectsLog::none()), (Ability::Native, Ability::Absent, 1), "a Verify is tried");
    }

    #[test]
    fn a_drive_makes_tags_only_where_they_are_all_metadata_and_compares_only_then() {
        let drives = profile(8, false, PiSource::Target).unwrap();
        assert_eq!((drives.metadata.bytes, drives.geometry.protection), (0, None));
        let refused = profile(64, false, PiSource::Target).unwrap_err();
        assert!(refused.contains("64 bytes"), "{refused}");
        let ours = profile(64, true, PiSource::Host).unwrap();
        assert_eq!(
            (ours.metadata.bytes, ours.metadata.tuple_at, ours.abilities.get(RequestKind::Compare)),
            (64, 56, Ability::Absent)
        );
    }
}
