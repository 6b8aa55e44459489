//! A namespace's geometry, limits, abilities and protection information, from its Identify pages.
//!
//! Pure, so that tests cover every inconsistent target. Every field is checked before use.

use sealblock_block::{Abilities, Ability, Geometry, Limits};
use sealblock_integrity::{GuardKind, PiFormat};
use sealblock_protocols_nvme::extensions::{Extensions, ReservedArea};
use sealblock_protocols_nvme::identify::{
    Controller, Ctratt, Dlfeat, IndependentNamespace, Namespace, NamespaceFormat, NamespaceId, Nmic, NvmController,
    NvmNamespace, Oacs, Oncs, Vwc, limit_bytes,
};
use sealblock_protocols_nvme::nvm::{DatasetManagement, MAX_BLOCKS};
use sealblock_protocols_nvme::registers::Capabilities;
use sealblock_units::{BlockCount, BlockSize};

use crate::{ConnectError, Options, PiSource};

/// NSATTR bit 0: the namespace is write protected.
const WRITE_PROTECTED: u8 = 1;
/// NSFEAT bit 5 of CNS 08h: VWCNP, the namespace has no volatile write cache.
const NO_VOLATILE_CACHE: u8 = 1 << 5;

/// The pages of one namespace and its controller.
#[derive(Clone)]
pub(crate) struct IdentifyPages {
    pub(crate) capabilities: Capabilities,
    pub(crate) controller: Controller,
    pub(crate) nvm_controller: Option<NvmController>,
    pub(crate) namespace: Namespace,
    pub(crate) nvm_namespace: Option<NvmNamespace>,
    pub(crate) independent: Option<IndependentNamespace>,
    pub(crate) ids: Vec<NamespaceId>,
    pub(crate) extensions: Extensions,
    pub(crate) bitmap_pages: u32,
}

/// Protection information of the namespace, and its generator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PiMode {
    /// The namespace has none.
    None,
    /// Tags travel with the data.
    Host(PiFormat),
    /// The target generates and checks the tags.
    Target(PiFormat),
}

/// Identifiers, size and format of a namespace: a new session must find the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NamespaceIdentity {
    pub(crate) uuid: Option<[u8; 16]>,
    pub(crate) nguid: Option<[u8; 16]>,
    pub(crate) eui64: Option<[u8; 8]>,
    pub(crate) serial: String,
    capacity_blocks: u64,
    format: NamespaceFormat,
}

/// What requests need to know of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceProfile {
    pub(crate) nsid: u32,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    pub(crate) pi_mode: PiMode,
    /// LBSTM: bits of the storage tag that can be checked.
    pub(crate) storage_tag_mask: u64,
    pub(crate) volatile_write_cache: bool,
    pub(crate) get_lba_status: bool,
    pub(crate) shared: bool,
    /// Ranges of one Dataset Management command.
    pub(crate) discard_ranges: usize,
    /// Blocks of one Dataset Management command.
    pub(crate) discard_blocks: u64,
    /// Entries of the error log.
    pub(crate) error_entries: u16,
    pub(crate) max_transfer_bytes: Option<u64>,
    pub(crate) max_verify_bytes: Option<u64>,
    pub(crate) max_write_zeroes_bytes: Option<u64>,
    pub(crate) identity: NamespaceIdentity,
}

impl NamespaceProfile {
    /// The profile of namespace `nsid` by its pages and the options.
    pub(crate) fn of(nsid: u32, pages: &IdentifyPages, options: &Options) -> Result<NamespaceProfile, ConnectError> {
        let unsupported = |why: String| ConnectError::Unsupported { nsid, why };
        let namespace = &pages.namespace;
        let identity = identity(nsid, pages)?;
        let (format, size) = (identity.format, identity.format.block_size);
        if format.metadata_bytes > 0 && !format.extended {
            return Err(unsupported("its metadata is in a buffer of its own, which TCP cannot carry".to_owned()));
        }
        let pi_mode = pi_mode(&format, options.protection).map_err(unsupported)?;
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
        let limits = limits(pages, options, size, pi_mode);
        let (ranges, range_blocks) = nvm.map_or((0, 0), |nvm| (nvm.dmrl, nvm.dmsl));
        Ok(NamespaceProfile {
            nsid,
            geometry: Geometry { block_size: size, capacity_blocks, protection: pi_mode.shown(), limits },
            abilities: abilities(pages, pi_mode),
            pi_mode,
            storage_tag_mask: format.storage_tag_mask,
            volatile_write_cache: has_volatile_cache(pages),
            get_lba_status: pages.controller.oacs.contains(Oacs::GET_LBA_STATUS),
            shared: namespace.nmic.contains(Nmic::SHARED),
            discard_ranges: if ranges == 0 { DatasetManagement::MAX_RANGES } else { usize::from(ranges) },
            discard_blocks: if range_blocks == 0 { u64::MAX } else { range_blocks },
            error_entries: pages.controller.elpe.get(),
            max_transfer_bytes: pages.controller.max_transfer_bytes(page_bytes),
            max_verify_bytes,
            max_write_zeroes_bytes: zeroes_limit(pages, page_bytes),
            identity,
        })
    }

    /// Refuses a namespace that differs from `before`. A namespace with an identifier may have been resized: the device keeps
    /// its capacity, and the controller refuses blocks that no longer exist.
    pub(crate) fn check_unchanged(&self, before: &NamespaceProfile) -> Result<(), ConnectError> {
        let (a, b) = (&self.identity, &before.identity);
        let what = if (a.uuid, a.nguid, a.eui64) != (b.uuid, b.nguid, b.eui64) {
            "it has another identifier".to_owned()
        } else if a.capacity_blocks != b.capacity_blocks && (a.uuid, a.nguid, a.eui64) == (None, None, None) {
            format!("it has {} blocks and had {}", a.capacity_blocks, b.capacity_blocks)
        } else if a.format != b.format {
            format!("its format is {:?} and was {:?}", a.format, b.format)
        } else if a.serial != b.serial && (a.uuid, a.nguid, a.eui64) == (None, None, None) {
            "the serial number is another, and the namespace has no identifier".to_owned()
        } else {
            return Ok(());
        };
        Err(ConnectError::Changed { what })
    }
}

impl PiMode {
    /// The protection information that the device has.
    pub(crate) const fn shown(self) -> Option<PiFormat> {
        match self {
            PiMode::Host(format) => Some(format),
            PiMode::None | PiMode::Target(_) => None,
        }
    }

    /// The protection information that the namespace stores.
    pub(crate) const fn kept(self) -> Option<PiFormat> {
        match self {
            PiMode::Host(format) | PiMode::Target(format) => Some(format),
            PiMode::None => None,
        }
    }
}

fn identity(nsid: u32, pages: &IdentifyPages) -> Result<NamespaceIdentity, ConnectError> {
    let namespace = &pages.namespace;
    // The index must name a format in the list.
    let formats = usize::from(namespace.nlbaf.get()) + usize::from(namespace.nulbaf);
    if namespace.format_index() >= formats {
        let why = format!("format {} of {formats}", namespace.format_index());
        return Err(ConnectError::Unexpected { what: "Identify Namespace", why });
    }
    let other_set = pages.ids.iter().find_map(|id| match id {
        NamespaceId::CommandSet(csi) if *csi != 0 => Some(*csi),
        _ => None,
    });
    if let Some(csi) = other_set {
        let why = format!("its command set is {csi}, not NVM");
        return Err(ConnectError::Unsupported { nsid, why });
    }
    let needs_page = namespace.dps.protection() != Ok(None)
        && pages.controller.ctratt.contains(Ctratt::EXTENDED_LBA_FORMATS)
        && pages.nvm_namespace.is_none();
    if needs_page {
        let why = "nothing, though formats are extended".to_owned();
        return Err(ConnectError::Unexpected { what: "Identify CNS 05h", why });
    }
    let format = NamespaceFormat::resolve(namespace, pages.nvm_namespace.as_ref())
        .map_err(|source| ConnectError::Format { nsid, source })?;
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
    Ok(NamespaceIdentity { uuid, nguid, eui64, serial, capacity_blocks: namespace.nsze, format })
}

/// `None` for an identifier that is all zeroes.
fn some<const N: usize>(id: [u8; N]) -> Option<[u8; N]> {
    (id != [0; N]).then_some(id)
}

fn pi_mode(format: &NamespaceFormat, wanted: PiSource) -> Result<PiMode, String> {
    let tuple = format.protection.map(|(format, _)| format);
    let metadata_bytes = tuple.map_or(0, PiFormat::tuple_bytes);
    if format.metadata_bytes != metadata_bytes {
        let (has, uses) = (format.metadata_bytes, metadata_bytes);
        return Err(format!("its blocks have {has} bytes of metadata, of which protection information uses {uses}"));
    }
    Ok(match (tuple, wanted) {
        (None, _) => PiMode::None,
        (Some(format), PiSource::Auto | PiSource::Host) => PiMode::Host(format),
        (Some(format), PiSource::Target) => PiMode::Target(format),
    })
}

/// WZSL, and WZDSL if supported. A value of 0 means no limit here, but MDTS to some hosts; the smaller reading is safe.
fn zeroes_limit(pages: &IdentifyPages, page_bytes: u64) -> Option<u64> {
    let nvm = pages.nvm_controller?;
    let plain = limit_bytes(nvm.wzsl, page_bytes);
    match pages.controller.oncs.contains(Oncs::WRITE_ZEROES_DEALLOCATE_LIMIT) {
        true => [plain, limit_bytes(nvm.wzdsl, page_bytes)].into_iter().flatten().min(),
        false => plain,
    }
}

fn limits(pages: &IdentifyPages, options: &Options, size: BlockSize, pi_mode: PiMode) -> Limits {
    let page_bytes = pages.capabilities.min_page_bytes();
    let mdts = pages.controller.max_transfer_bytes(page_bytes);
    let tuple_bytes = pi_mode.shown().map_or(0, PiFormat::tuple_bytes);
    let counts_metadata = !pages.controller.ctratt.contains(Ctratt::LIMITS_EXCLUDE_METADATA);
    let stride = size.bytes() + if counts_metadata { tuple_bytes } else { 0 };
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

fn abilities(pages: &IdentifyPages, pi_mode: PiMode) -> Abilities {
    let oncs = pages.controller.oncs;
    let when = |bit| if oncs.contains(bit) { Ability::Native } else { Ability::Absent };
    let has = |bit| if pages.extensions.contains(bit) { Ability::Native } else { Ability::Absent };
    let max = pages.controller.max_transfer_bytes(pages.capabilities.min_page_bytes());
    let fits = ReservedArea::ALL.iter().all(|area| max.is_none_or(|max| area.frame_bytes() as u64 <= max));
    let dlfeat = pages.namespace.dlfeat;
    let nsattr = pages.namespace.nsattr | pages.independent.map_or(0, |page| page.nsattr);
    Abilities {
        writable: nsattr & WRITE_PROTECTED == 0,
        verify: when(Oncs::VERIFY),
        compare: when(Oncs::COMPARE),
        discard: when(Oncs::DATASET_MANAGEMENT),
        write_zeroes: when(Oncs::WRITE_ZEROES),
        write_uncorrectable: Ability::Absent,
        unmap_zeroes: oncs.contains(Oncs::WRITE_ZEROES)
            && dlfeat.reads_zeroes()
            && dlfeat.contains(Dlfeat::WRITE_ZEROES_DEALLOCATE),
        offloads: true,
        checksum: has(Extensions::CHECKSUM),
        repair: Ability::Absent,
        block_status: Ability::Absent,
        reserved: if fits { has(Extensions::RESERVED) } else { Ability::Absent },
        bitmap_pages: if fits { pages.bitmap_pages } else { 0 },
        seals: pi_mode.kept().is_some() || pages.extensions.contains(Extensions::SEALS),
        copies: pages.extensions.contains(Extensions::COPIES),
    }
}

fn has_volatile_cache(pages: &IdentifyPages) -> bool {
    let none = pages.independent.is_some_and(|page| page.nsfeat & NO_VOLATILE_CACHE != 0);
    pages.controller.vwc.contains(Vwc::PRESENT) && !none
}

/// True if one CRC serves data digests and guards of these blocks.
pub(crate) fn shares_crcs(pi_mode: PiMode) -> bool {
    pi_mode.shown().is_some_and(|format| format.guard() == GuardKind::Crc32c)
}

#[cfg(test)]
mod tests;
