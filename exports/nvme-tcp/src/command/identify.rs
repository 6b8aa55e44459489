//! Identify data of a controller and its namespaces.

use sealblock_block::{Ability, RequestKind};
use sealblock_integrity::{GuardKind, PiFormat};
use sealblock_protocols_nvme::admin::{Cns, Identify};
use sealblock_protocols_nvme::features::EventConfiguration;
use sealblock_protocols_nvme::identify::{
    Cmic, Controller as ControllerPage, ControllerType, Ctratt, Dlfeat, Fuses, IndependentNamespace, Lpa,
    Namespace as NamespacePage, NamespaceId, Nmic, Nstat, NvmController, NvmNamespace, Oacs, Ofcs, Oncs, Pic, Sgls,
    Vwc, command_sets, namespace_list,
};
use sealblock_protocols_nvme::nqn::PaddedText;
use sealblock_protocols_nvme::registers::Version;
use sealblock_protocols_nvme::{Ascii, Count8, Invalid, StatusCode};

use crate::command::{copy, fused};
use crate::model::async_events::{EVENT_REQUESTS, SUPPORTED_EVENTS};
use crate::model::command_error::CommandError;
use crate::model::controller::{Controller, ERROR_ENTRIES, KAS};
use crate::model::limits::{DISCARD_BLOCKS, DISCARD_RANGE_BLOCKS, DISCARD_RANGES, IN_CAPSULE_BYTES, Limits, WZSL};
use crate::model::namespace::MAX_NSID;
use crate::model::namespace::Namespace;

/// Version 1.1 of the NVM Command Set specification.
const NVM_1_1: u32 = 0x0001_0100;
/// The optional commands that every namespace supports.
const ONCS: Oncs = Oncs::COMPARE
    .union(Oncs::DATASET_MANAGEMENT)
    .union(Oncs::WRITE_ZEROES)
    .union(Oncs::TIMESTAMP)
    .union(Oncs::VERIFY)
    .union(Oncs::COPY);
/// NSATTR bit 0: the namespace is write protected.
const WRITE_PROTECTED: u8 = 1;

pub(crate) fn page(controller: &Controller, limits: &Limits, args: &Identify) -> Result<[u8; 4096], CommandError> {
    if controller.is_discovery && args.cns != Cns::Controller {
        return Err(Invalid::field("CNS", 10, 0).into());
    }
    let by_set = [Cns::CommandSetNamespace, Cns::CommandSetController, Cns::CommandSetActiveNamespaces];
    if by_set.contains(&args.cns) && args.csi != 0 {
        return Err(Invalid::field("CSI", 11, 24).into());
    }
    match args.cns {
        Cns::Controller => Ok(identify_controller(controller, limits).encode()),
        Cns::ActiveNamespaces | Cns::CommandSetActiveNamespaces => {
            let active = controller.subsystem.namespaces();
            let list = namespace_list(active.keys().copied(), args.nsid);
            controller.active_list_read(&active, args.nsid);
            list.ok_or(StatusCode::INVALID_NAMESPACE.into())
        }
        Cns::CommandSetController => {
            // The only limits of Verify and Write Uncorrectable are those of their fields.
            let (dmrl, dmrsl, dmsl) = (DISCARD_RANGES, DISCARD_RANGE_BLOCKS, DISCARD_BLOCKS);
            Ok(NvmController { wzsl: WZSL, dmrl, dmrsl, dmsl, ver: NVM_1_1, ..NvmController::default() }.encode())
        }
        Cns::CommandSets => Ok(command_sets()),
        Cns::Namespace | Cns::NamespaceDescriptors | Cns::CommandSetNamespace | Cns::IndependentNamespace => {
            of_namespace(controller, args)
        }
        Cns::AllocatedNamespaces | Cns::AllocatedNamespace | Cns::NamespaceControllers | Cns::Controllers => {
            Err(Invalid::field("CNS", 10, 0).into())
        }
    }
}

/// For an inactive identifier, returns zeroes where the data structure describes a namespace (Base, "Identify Namespace
/// data structure"); it has no descriptors (Base, "Namespace Identification Descriptor list").
fn of_namespace(controller: &Controller, args: &Identify) -> Result<[u8; 4096], CommandError> {
    let namespace = match controller.namespace(args.nsid) {
        Ok(namespace) => namespace,
        Err(StatusCode::INVALID_FIELD) if args.cns != Cns::NamespaceDescriptors => return Ok([0; 4096]),
        Err(status) => return Err(status.into()),
    };
    let (mut page, mut nvm) = (identify_namespace(&namespace), NvmNamespace::default());
    namespace.wire_format().describe(&mut page, &mut nvm);
    nvm.pic = namespace.format().map_or(Pic::NONE, pic);
    Ok(match args.cns {
        Cns::Namespace => page.encode(),
        Cns::CommandSetNamespace => nvm.encode(),
        Cns::NamespaceDescriptors => {
            NamespaceId::list(&[NamespaceId::Uuid(namespace.uuid), NamespaceId::CommandSet(0)])
        }
        _ => {
            let (nmic, nsattr, nstat) = (page.nmic, page.nsattr, Nstat::READY);
            IndependentNamespace { nmic, nsattr, nstat, ..IndependentNamespace::default() }.encode()
        }
    })
}

/// The storage tag capabilities: Copy checks storage tags when it reads, and a mask has all bits or none.
fn pic(format: PiFormat) -> Pic {
    match (format.storage_tag_bits(), format.guard()) {
        (0, _) => Pic::NONE,
        (_, GuardKind::Crc16 | GuardKind::IpChecksum) => {
            Pic::STORAGE_TAG_16 | Pic::STORAGE_TAG_MASK_16 | Pic::STORAGE_TAG_CHECK_READ
        }
        (_, GuardKind::Crc32c | GuardKind::Crc64) => Pic::STORAGE_TAG_CHECK_READ,
    }
}

fn identify_namespace(namespace: &Namespace) -> NamespacePage {
    let (geometry, abilities) = (namespace.device.geometry(), namespace.device.abilities());
    let blocks = geometry.capacity_blocks;
    // Deallocated blocks read as zeroes only if the device guarantees it.
    let dlfeat = match abilities.unmap_zeroes && abilities.get(RequestKind::WriteZeroes) != Ability::Absent {
        true => Dlfeat::READS_ZEROES | Dlfeat::WRITE_ZEROES_DEALLOCATE,
        false => Dlfeat::NONE,
    };
    let copy = copy::limits(geometry.block_size);
    NamespacePage {
        nsze: blocks,
        ncap: blocks,
        // All blocks always count as used, and NSFEAT does not claim thin provisioning (THINP). With that bit NUSE
        // would have to follow every deallocation, but a volume does not count its blocks in use, because it loads its
        // maps when needed.
        nuse: blocks,
        nmic: Nmic::SHARED,
        mssrl: copy.range_blocks,
        mcl: copy.total_blocks,
        msrc: copy.ranges,
        dlfeat,
        nvmcap: u128::from(geometry.capacity_bytes()),
        nsattr: if abilities.writable { 0 } else { WRITE_PROTECTED },
        ..NamespacePage::default()
    }
}

fn identify_controller(controller: &Controller, limits: &Limits) -> ControllerPage {
    let subsystem = &controller.subsystem;
    let common = ControllerPage {
        sn: Ascii::new(&subsystem.serial),
        mn: Ascii::new(&subsystem.model),
        fr: Ascii::new(env!("CARGO_PKG_VERSION")),
        mdts: limits.mdts(),
        cntlid: controller.id,
        ver: Version::V2_1.bits(),
        ctratt: Ctratt::HOST_IDENTIFIER_128 | Ctratt::TRAFFIC_BASED_KEEP_ALIVE,
        cntrltype: ControllerType::Discovery.code(),
        aerl: Count8::saturating(EVENT_REQUESTS),
        oaes: EventConfiguration::DISCOVERY_LOG_CHANGE,
        lpa: Lpa::EXTENDED_DATA,
        elpe: Count8::saturating(ERROR_ENTRIES),
        kas: KAS,
        maxcmd: limits.commands,
        sgls: Sgls::SUPPORTED | Sgls::OFFSET | Sgls::TRANSPORT,
        subnqn: PaddedText::new(subsystem.nqn.as_str()),
        ..ControllerPage::default()
    };
    if controller.is_discovery { common } else { with_namespaces(controller, common) }
}

/// Adds the fields of a controller with namespaces.
fn with_namespaces(controller: &Controller, common: ControllerPage) -> ControllerPage {
    let subsystem = &controller.subsystem;
    ControllerPage {
        cmic: Cmic::MULTIPLE_CONTROLLERS,
        ctratt: common.ctratt | Ctratt::EXTENDED_LBA_FORMATS | Ctratt::LIMITS_EXCLUDE_METADATA,
        cntrltype: ControllerType::Io.code(),
        frmw: 0b11,
        lpa: common.lpa | Lpa::COMMANDS_SUPPORTED_AND_EFFECTS | Lpa::SUPPORTED_LOG_PAGES,
        oaes: SUPPORTED_EVENTS,
        oacs: Oacs::GET_LBA_STATUS,
        sqes: 0x66,
        cqes: 0x44,
        nn: MAX_NSID,
        mnan: MAX_NSID,
        oncs: if subsystem.can_write_uncorrectable() { ONCS | Oncs::WRITE_UNCORRECTABLE } else { ONCS },
        fuses: Fuses::COMPARE_AND_WRITE,
        // Only one block is written atomically: AWUN, AWUPF and ACWU are one block.
        acwu: (fused::ATOMIC_BLOCKS - 1) as u16,
        cdfs: 0b11,
        ofcs: Ofcs::DISCONNECT,
        vwc: Vwc::PRESENT | Vwc::FLUSH_ALL_LOW | Vwc::FLUSH_ALL_HIGH,
        ioccsz: (64 + IN_CAPSULE_BYTES) / 16,
        iorcsz: 1,
        msdbd: 1,
        ..common
    }
}
