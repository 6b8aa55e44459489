//! A namespace's geometry, limits, abilities and protection information, from its Identify pages.
//!
//! Pure, so that tests cover every inconsistent target. Every field is checked before use.

use sealblock_block::{Abilities, Ability, Freshness, Geometry, Limits, RequestKind};
use sealblock_integrity::{ChecksumKind, GuardKind, PiFormat, PiPosition, ProtectionType};
use sealblock_protocols_nvme::extensions::{Extensions, ReservedArea};
use sealblock_protocols_nvme::identify::{
    Ctratt, Dlfeat, NamespaceFormat, NamespaceId, Nmic, Oacs, Oncs, Vwc, limit_bytes,
};
use sealblock_protocols_nvme::nvm::{CopyDescriptorFormat, DatasetManagement, MAX_BLOCKS};
use sealblock_units::{BlockCount, BlockSize};

use crate::pages::{IdentifyPages, NamespaceError};

/// NSATTR bit 0: the namespace is write protected.
const WRITE_PROTECTED: u8 = 1;
/// NSFEAT bit 5 of CNS 08h: VWCNP, the namespace has no volatile write cache.
const NO_VOLATILE_CACHE: u8 = 1 << 5;

/// Generator of the tags of a namespace with protection information. Without effect on a namespace without.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PiSource {
    /// As [`PiSource::Host`].
    #[default]
    Auto,
    /// PRACT = 0: tags are transferred with the data, from the writer to the medium and back, and are checked at both
    /// ends.
    Host,
    /// PRACT = 1: the controller generates and checks the tags; the device has no protection information, and the data
    /// have no tags between controller and host.
    Target,
}

/// Metadata that can be transferred to the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetadataSupport {
    /// Tuples after each block, and no other metadata: what this host supports over TCP.
    Interleaved,
    /// Metadata of any size, after each block or in a separate buffer, with or without a tuple at the start or end.
    Any,
}

/// The options that a profile depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfileOptions {
    /// Who makes tags.
    pub source: PiSource,
    /// Metadata that can be transferred.
    pub metadata: MetadataSupport,
    /// Maximum bytes of one transfer, limited to MDTS; at least one block.
    pub transfer_bytes: u32,
}

/// Protection information of the namespace, and its generator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PiMode {
    /// The namespace has none.
    None,
    /// Tags are transferred with the data.
    Host(PiFormat),
    /// The target generates and checks the tags.
    Target(PiFormat),
}

/// Metadata transferred with the data of each block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metadata {
    /// Bytes for each block; 0 if there are none, or if the controller makes and strips them.
    pub bytes: usize,
    /// True if they follow the data of their block, false if they are in a separate buffer.
    pub is_interleaved: bool,
    /// Where the tuple begins in them, if they have one.
    pub tuple_at: usize,
}

impl Metadata {
    fn of(format: &NamespaceFormat, pi_mode: PiMode) -> Metadata {
        let bytes = if matches!(pi_mode, PiMode::Target(_)) { 0 } else { format.metadata_bytes };
        let tuple_at = match format.protection {
            Some((tuple, PiPosition::Last)) => bytes.saturating_sub(tuple.tuple_bytes()),
            Some((_, PiPosition::First)) | None => 0,
        };
        Metadata { bytes, is_interleaved: format.extended, tuple_at }
    }
}

/// Identifiers, size and format of a namespace: a new session must find the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceIdentity {
    /// UUID, if the namespace has one.
    pub uuid: Option<[u8; 16]>,
    /// NGUID, if it has one.
    pub nguid: Option<[u8; 16]>,
    /// EUI64, if it has one.
    pub eui64: Option<[u8; 8]>,
    /// SN: the serial number of the subsystem.
    pub serial: String,
    /// The number of its content, where its target says it.
    pub content: Option<u64>,
    capacity_blocks: u64,
    format: NamespaceFormat,
}

/// What requests need to know about a namespace.
#[derive(Clone, Debug)]
pub struct NamespaceProfile {
    /// NSID.
    pub nsid: u32,
    /// The geometry of the device.
    pub geometry: Geometry,
    /// What it executes itself.
    pub abilities: Abilities,
    /// Its protection information.
    pub pi_mode: PiMode,
    /// Metadata transferred with the data.
    pub metadata: Metadata,
    /// LBSTM: bits of the storage tag that can be checked.
    pub storage_tag_mask: u64,
    /// When it was opened, a Verify with CEB checked blocks whose tuples disable checks, too.
    pub checks_escapes: bool,
    /// Writes are volatile until a Flush (VWC, VWCNP).
    pub volatile_write_cache: bool,
    /// The controller has Get LBA Status.
    pub get_lba_status: bool,
    /// Other controllers may use the namespace (NMIC).
    pub shared: bool,
    /// Ranges of one Dataset Management command.
    pub discard_ranges: usize,
    /// Blocks of one Dataset Management command.
    pub discard_blocks: u64,
    /// How blocks are copied within it, if tags stay as they are.
    pub copy: Option<CopyPlan>,
    /// Entries of the error log.
    pub error_entries: u16,
    /// MDTS in bytes; `None` for no limit.
    pub max_transfer_bytes: Option<u64>,
    /// VSL in bytes; `None` for no limit or no such page.
    pub max_verify_bytes: Option<u64>,
    /// WZSL in bytes; `None` for no limit or no such page.
    pub max_write_zeroes_bytes: Option<u64>,
    /// The values that identify it.
    pub identity: NamespaceIdentity,
}

/// How blocks are copied within a namespace: the form of source ranges, how many one command may have, and how long
/// each may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyPlan {
    /// The descriptor format, which depends on the guard.
    pub format: CopyDescriptorFormat,
    /// Maximum blocks of one source range.
    pub range_blocks: BlockCount,
    /// Maximum blocks of one command. A command that ends at a multiple of it has no more ranges than allowed.
    pub command_blocks: BlockCount,
}

impl CopyPlan {
    /// Maximum blocks of one command, whatever the controller allows: nobody writes to the blocks while it is executed.
    const MOST_BLOCKS: u32 = 1 << 16;

    /// The plan by MSSRL, MCL, MSRC and CDFS; `None` if one of these has no value, or if tags would not stay as they
    /// are: see `copy.rs`.
    fn of(pages: &IdentifyPages, format: &NamespaceFormat, pi_mode: PiMode) -> Option<CopyPlan> {
        let stays = match pi_mode {
            PiMode::None | PiMode::Target(_) => true,
            PiMode::Host(tuple) => tuple.protection() == ProtectionType::Type3,
        };
        // PRACT applies to tuples, and the meaning of other metadata is unknown here.
        if !stays || !has_only_tuples(format) {
            return None;
        }
        let form = CopyDescriptorFormat::of(pi_mode.kept());
        if pages.controller.cdfs & 1 << form.code() == 0 {
            return None;
        }
        let namespace = &pages.namespace;
        let (range, ranges) = (u32::from(namespace.mssrl), u32::from(namespace.msrc.get()));
        let most = namespace.mcl.min(range.saturating_mul(ranges)).min(CopyPlan::MOST_BLOCKS);
        let most = if most > range && range > 0 { most / range * range } else { most };
        Some(CopyPlan {
            format: form,
            range_blocks: BlockCount::new(range.min(most))?,
            command_blocks: BlockCount::new(most)?,
        })
    }
}

impl NamespaceProfile {
    /// The profile of namespace `nsid` by its pages and the options.
    ///
    /// # Errors
    /// Pages that are inconsistent, and properties that this host does not support.
    pub fn of(nsid: u32, pages: &IdentifyPages, options: &ProfileOptions) -> Result<NamespaceProfile, NamespaceError> {
        let unsupported = |why: String| NamespaceError::Unsupported { nsid, why };
        let namespace = &pages.namespace;
        let identity = identity(nsid, pages)?;
        let (format, size) = (identity.format, identity.format.block_size);
        let pi_mode = pi_mode(&format, options).map_err(unsupported)?;
        let capacity_blocks = namespace.nsze;
        if capacity_blocks == 0 {
            return Err(unsupported("it has no blocks".to_owned()));
        }
        if capacity_blocks > u64::MAX >> size.shift() {
            return Err(unsupported(format!("{capacity_blocks} blocks of {size} bytes cannot be counted in bytes")));
        }
        let page_bytes = pages.capabilities.min_page_bytes();
        let nvm = pages.nvm_controller;
        let max_verify_bytes = nvm.and_then(|nvm| limit_bytes(nvm.vsl, page_bytes));
        // Tags that the controller makes count too: a Compare contains them.
        let limits = limits(pages, options, size, if format.extended { format.metadata_bytes } else { 0 });
        let (ranges, range_blocks) = nvm.map_or((0, 0), |nvm| (nvm.dmrl, nvm.dmsl));
        let copy = CopyPlan::of(pages, &format, pi_mode);
        Ok(NamespaceProfile {
            nsid,
            geometry: Geometry { block_size: size, capacity_blocks, protection: pi_mode.shown(), limits },
            abilities: abilities(pages, pi_mode, has_only_tuples(&format), copy.is_some()),
            pi_mode,
            metadata: Metadata::of(&format, pi_mode),
            storage_tag_mask: format.storage_tag_mask,
            checks_escapes: pages.extensions.contains(Extensions::ESCAPES),
            volatile_write_cache: has_volatile_cache(pages),
            get_lba_status: pages.controller.oacs.contains(Oacs::GET_LBA_STATUS),
            shared: namespace.nmic.contains(Nmic::SHARED),
            discard_ranges: if ranges == 0 { DatasetManagement::MAX_RANGES } else { usize::from(ranges) },
            discard_blocks: if range_blocks == 0 { u64::MAX } else { range_blocks },
            copy,
            error_entries: pages.controller.elpe.get(),
            max_transfer_bytes: pages.controller.max_transfer_bytes(page_bytes),
            max_verify_bytes,
            max_write_zeroes_bytes: zeroes_limit(pages, page_bytes),
            identity,
        })
    }

    /// Refuses a namespace that differs from `before`, or is in another subsystem. A copy of a volume may have the same
    /// identifier as the volume, so the serial number counts. A namespace with an identifier may have been resized: the
    /// device keeps its capacity, and the controller refuses blocks that no longer exist.
    ///
    /// # Errors
    /// [`NamespaceError::Changed`].
    pub fn check_unchanged(&self, before: &NamespaceProfile) -> Result<(), NamespaceError> {
        let (a, b) = (&self.identity, &before.identity);
        let what = if (a.uuid, a.nguid, a.eui64) != (b.uuid, b.nguid, b.eui64) {
            "it has another identifier".to_owned()
        } else if a.capacity_blocks != b.capacity_blocks && (a.uuid, a.nguid, a.eui64) == (None, None, None) {
            format!("it has {} blocks and had {}", a.capacity_blocks, b.capacity_blocks)
        } else if a.format != b.format {
            format!("its format is {:?} and was {:?}", a.format, b.format)
        } else if a.serial != b.serial {
            format!("its subsystem has the serial number {:?} and had {:?}", a.serial, b.serial)
        } else if a.content.zip(b.content).is_some_and(|(now, then)| now != then) {
            "its server has something else in the place of what it was".to_owned()
        } else {
            return Ok(());
        };
        Err(NamespaceError::Changed { what })
    }
}

impl PiMode {
    /// The protection information that the device has.
    pub const fn shown(self) -> Option<PiFormat> {
        match self {
            PiMode::Host(format) => Some(format),
            PiMode::None | PiMode::Target(_) => None,
        }
    }

    /// The protection information that the namespace stores.
    pub const fn kept(self) -> Option<PiFormat> {
        match self {
            PiMode::Host(format) | PiMode::Target(format) => Some(format),
            PiMode::None => None,
        }
    }
}

fn identity(nsid: u32, pages: &IdentifyPages) -> Result<NamespaceIdentity, NamespaceError> {
    let namespace = &pages.namespace;
    // The index must name a format in the list.
    let formats = usize::from(namespace.nlbaf.get()) + usize::from(namespace.nulbaf);
    if namespace.format_index() >= formats {
        let why = format!("format {} of {formats}", namespace.format_index());
        return Err(NamespaceError::Unexpected { what: "Identify Namespace", why });
    }
    let other_set = pages.ids.iter().find_map(|id| match id {
        NamespaceId::CommandSet(csi) if *csi != 0 => Some(*csi),
        _ => None,
    });
    if let Some(csi) = other_set {
        let why = format!("its command set is {csi}, not NVM");
        return Err(NamespaceError::Unsupported { nsid, why });
    }
    let needs_page = namespace.dps.protection() != Ok(None)
        && pages.controller.ctratt.contains(Ctratt::EXTENDED_LBA_FORMATS)
        && pages.nvm_namespace.is_none();
    if needs_page {
        let why = "nothing, though formats are extended".to_owned();
        return Err(NamespaceError::Unexpected { what: "Identify CNS 05h", why });
    }
    let format = NamespaceFormat::resolve(namespace, pages.nvm_namespace.as_ref())
        .map_err(|source| NamespaceError::Format { nsid, source })?;
    let (mut uuid, mut nguid, mut eui64) = (None, some(namespace.nguid), some(namespace.eui64));
    for id in &pages.ids {
        match id {
            NamespaceId::Uuid(id) => uuid = some(*id),
            NamespaceId::Nguid(id) => nguid = some(*id),
            NamespaceId::Eui64(id) => eui64 = some(*id),
            NamespaceId::CommandSet(_) => {}
        }
    }
    let serial = pages.controller.sn.text();
    let (content, capacity_blocks) = (pages.content, namespace.nsze);
    Ok(NamespaceIdentity { uuid, nguid, eui64, serial, content, capacity_blocks, format })
}

/// `None` for an identifier that is all zeroes.
fn some<const N: usize>(id: [u8; N]) -> Option<[u8; N]> {
    (id != [0; N]).then_some(id)
}

fn pi_mode(format: &NamespaceFormat, options: &ProfileOptions) -> Result<PiMode, String> {
    let tuple = format.protection.map(|(format, _)| format);
    let tuple_bytes = tuple.map_or(0, PiFormat::tuple_bytes);
    if options.metadata == MetadataSupport::Interleaved {
        if format.metadata_bytes > 0 && !format.extended {
            return Err("its metadata is in a buffer of its own, which TCP cannot carry".to_owned());
        }
        if format.metadata_bytes != tuple_bytes {
            let has = format.metadata_bytes;
            return Err(format!(
                "its blocks have {has} bytes of metadata, of which protection information uses {tuple_bytes}"
            ));
        }
    }
    Ok(match (tuple, options.source) {
        (None, _) => PiMode::None,
        (Some(format), PiSource::Auto | PiSource::Host) => PiMode::Host(format),
        // With PRACT = 1, metadata outside the tuple are still transferred (NVM, "PRACT").
        (Some(_), PiSource::Target) if format.metadata_bytes != tuple_bytes => {
            let has = format.metadata_bytes;
            return Err(format!(
                "the controller makes tags only if they are all metadata, and blocks have {has} bytes of it, tags {tuple_bytes}"
            ));
        }
        (Some(format), PiSource::Target) => PiMode::Target(format),
    })
}

/// WZSL, and WZDSL if supported. A value of 0 means no limit here, but MDTS to some hosts; the smaller interpretation
/// is safe.
fn zeroes_limit(pages: &IdentifyPages, page_bytes: u64) -> Option<u64> {
    let nvm = pages.nvm_controller?;
    let plain = limit_bytes(nvm.wzsl, page_bytes);
    match pages.controller.oncs.contains(Oncs::WRITE_ZEROES_DEALLOCATE_LIMIT) {
        true => [plain, limit_bytes(nvm.wzdsl, page_bytes)].into_iter().flatten().min(),
        false => plain,
    }
}

fn limits(pages: &IdentifyPages, options: &ProfileOptions, size: BlockSize, metadata_bytes: usize) -> Limits {
    let page_bytes = pages.capabilities.min_page_bytes();
    let mdts = pages.controller.max_transfer_bytes(page_bytes);
    let counts_metadata = !pages.controller.ctratt.contains(Ctratt::LIMITS_EXCLUDE_METADATA);
    let stride = size.bytes() + if counts_metadata { metadata_bytes } else { 0 };
    let own = u64::from(options.transfer_bytes) / size.bytes() as u64;
    let transfer = mdts.map_or(own, |mdts| own.min(mdts / stride as u64)).min(u64::from(MAX_BLOCKS));
    let boundary = u64::from(pages.namespace.noiob);
    let transfer = if boundary > 0 && boundary < transfer { transfer / boundary * boundary } else { transfer };
    let in_blocks = |bytes: Option<u64>| bytes.map_or(u64::from(MAX_BLOCKS), |bytes| bytes >> size.shift());
    let verify = in_blocks(pages.nvm_controller.and_then(|nvm| limit_bytes(nvm.vsl, page_bytes)));
    let zero = in_blocks(zeroes_limit(pages, page_bytes).or(mdts));
    // Each range of a Discard has this limit, and all ranges of a command together have another.
    let range = match pages.nvm_controller.map_or(0, |nvm| nvm.dmrsl) {
        0 => u64::MAX,
        max if pages.controller.oncs.contains(Oncs::DATASET_MANAGEMENT) => u64::from(max),
        _ => u64::MAX,
    };
    let total = match pages.nvm_controller.map_or(0, |nvm| nvm.dmsl) {
        0 => u64::MAX,
        max => max,
    };
    let zero = zero.min(range).min(total);
    Limits { max_transfer_blocks: count(transfer), max_verify_blocks: count(verify), max_zero_blocks: count(zero) }
}

/// `blocks`, clamped to 1 and the maximum of one command.
fn count(blocks: u64) -> BlockCount {
    BlockCount::new(blocks.clamp(1, u64::from(MAX_BLOCKS)) as u32).expect("at least 1")
}

fn abilities(pages: &IdentifyPages, pi_mode: PiMode, has_only_tuples: bool, keeps_tags: bool) -> Abilities {
    let oncs = pages.controller.oncs;
    let when = |bit| Ability::native_if(oncs.contains(bit));
    let has = |bit| pages.extensions.contains(bit);
    let max = pages.controller.max_transfer_bytes(pages.capabilities.min_page_bytes());
    let fits = ReservedArea::ALL.iter().all(|area| max.is_none_or(|max| area.frame_bytes() as u64 <= max));
    let dlfeat = pages.namespace.dlfeat;
    let nsattr = pages.namespace.nsattr | pages.independent.map_or(0, |page| page.nsattr);
    let mut abilities = Abilities {
        writable: nsattr & WRITE_PROTECTED == 0,
        // Set by media that can send fused commands.
        compare_and_write_blocks: 0,
        unmap_zeroes: oncs.contains(Oncs::WRITE_ZEROES)
            && dlfeat.reads_zeroes()
            && dlfeat.contains(Dlfeat::WRITE_ZEROES_DEALLOCATE),
        offloads: true,
        bitmap_pages: if fits { pages.bitmap_pages } else { 0 },
        seals: pi_mode.kept().is_some() || has(Extensions::SEALS),
        copies: has(Extensions::COPIES),
        freshness: Freshness::from_bits(pages.extensions.older()),
        ..Abilities::BASIC
    };
    let both_kinds = Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C;
    abilities.set_checksum(ChecksumKind::Crc64Nvme, Ability::native_if(has(Extensions::CHECKSUM)));
    abilities.set_checksum(ChecksumKind::Crc32c, Ability::native_if(has(both_kinds)));
    abilities
        .with([RequestKind::Verify], when(Oncs::VERIFY))
        // Compare treats other metadata as data, and its contents are unknown here.
        .with([RequestKind::Compare], Ability::native_if(has_only_tuples && oncs.contains(Oncs::COMPARE)))
        .with([RequestKind::Discard], when(Oncs::DATASET_MANAGEMENT))
        .with([RequestKind::WriteZeroes], when(Oncs::WRITE_ZEROES))
        .with([RequestKind::Copy], Ability::native_if(keeps_tags && oncs.contains(Oncs::COPY)))
        .with([RequestKind::ReadReserved], Ability::native_if(fits && has(Extensions::RESERVED)))
}

/// True if blocks have no metadata other than their tuples.
fn has_only_tuples(format: &NamespaceFormat) -> bool {
    format.metadata_bytes == format.protection.map_or(0, |(tuple, _)| tuple.tuple_bytes())
}

fn has_volatile_cache(pages: &IdentifyPages) -> bool {
    let none = pages.independent.is_some_and(|page| page.nsfeat & NO_VOLATILE_CACHE != 0);
    pages.controller.vwc.contains(Vwc::PRESENT) && !none
}

/// True if one CRC is enough for data digests and guards of these blocks.
pub fn shares_crcs(pi_mode: PiMode) -> bool {
    pi_mode.shown().is_some_and(|format| format.guard() == GuardKind::Crc32c)
}

#[cfg(test)]
pub(crate) mod tests;
