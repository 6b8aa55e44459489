//! Identify Controller (CNS 01h) and its part for the NVM command set (CNS 06h).

use crate::features::EventConfiguration;
use crate::nqn::PaddedText;
use crate::wire::{Ascii, Count8, codes, flags, layout};

codes! {
    /// What a controller is for (Base, field CNTRLTYPE).
    pub enum ControllerType: u8 {
        /// I/O controller.
        Io = 1,
        /// Discovery controller.
        Discovery = 2,
        /// Administrative controller.
        Administrative = 3,
    }
}

flags! {
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
    pub struct Cmic(u8) {
        /// The subsystem may have more than one controller.
        MULTIPLE_CONTROLLERS = 1,
        /// Asymmetric Namespace Access is reported.
        ANA = 3,
    }
}

flags! {
    /// Controller Attributes (CTRATT).
    pub struct Ctratt(u32) {
        /// HIDS: 128-bit host identifiers; always over Fabrics.
        HOST_IDENTIFIER_128 = 0,
        /// TBKAS: any command keeps the connection alive.
        TRAFFIC_BASED_KEEP_ALIVE = 6,
        /// ELBAS: extended LBA formats, so formats with 32- and 64-bit guards.
        EXTENDED_LBA_FORMATS = 15,
        /// MEM: MDTS and the size limits leave metadata out.
        LIMITS_EXCLUDE_METADATA = 16,
    }
}

flags! {
    /// Optional Admin Command Support (OACS).
    pub struct Oacs(u16) {
        /// Format NVM.
        FORMAT = 1,
        /// Get LBA Status.
        GET_LBA_STATUS = 9,
    }
}

flags! {
    /// Log Page Attributes (LPA).
    pub struct Lpa(u8) {
        /// Commands Supported and Effects.
        COMMANDS_SUPPORTED_AND_EFFECTS = 1,
        /// Offsets, and lengths of more than 16 bits, in Get Log Page.
        EXTENDED_DATA = 2,
        /// Supported Log Pages, and the other pages that say what is supported.
        SUPPORTED_LOG_PAGES = 5,
    }
}

flags! {
    /// Optional NVM Command Support (ONCS).
    pub struct Oncs(u16) {
        /// Compare.
        COMPARE = 0,
        /// Write Uncorrectable.
        WRITE_UNCORRECTABLE = 1,
        /// Dataset Management.
        DATASET_MANAGEMENT = 2,
        /// Write Zeroes.
        WRITE_ZEROES = 3,
        /// The Timestamp feature.
        TIMESTAMP = 6,
        /// Verify.
        VERIFY = 7,
        /// Copy.
        COPY = 8,
        /// MAXWZD: Write Zeroes with DEAC has a limit of its own, WZDSL.
        WRITE_ZEROES_DEALLOCATE_LIMIT = 11,
    }
}

flags! {
    /// Fused operations (FUSES).
    pub struct Fuses(u16) {
        /// Compare and Write.
        COMPARE_AND_WRITE = 0,
    }
}

flags! {
    /// Volatile Write Cache (VWC).
    pub struct Vwc(u8) {
        /// There is one, so hosts must Flush.
        PRESENT = 0,
        /// With the next bit: how Flush for all namespaces is answered.
        FLUSH_ALL_LOW = 1,
        /// 10b fails it, 11b flushes all namespaces.
        FLUSH_ALL_HIGH = 2,
    }
}

flags! {
    /// SGL support (SGLS); bits 1:0 are 1 for SGLs without alignment, 2 with dword alignment.
    pub struct Sgls(u32) {
        /// SGLs are supported, byte-aligned.
        SUPPORTED = 0,
        /// The address of a descriptor may be an offset, as data in a capsule has it.
        OFFSET = 20,
        /// Transport SGL data block descriptors.
        TRANSPORT = 21,
    }
}

flags! {
    /// Optional Fabrics Commands Support (OFCS).
    pub struct Ofcs(u16) {
        /// Disconnect.
        DISCONNECT = 0,
    }
}

layout! {
    /// Identify Controller (Base, "Identify Controller data structure").
    pub struct Controller[4096] {
        /// VID: PCI vendor.
        0 => vid: u16,
        /// SSVID: PCI subsystem vendor.
        2 => ssvid: u16,
        /// SN: serial number.
        4 => sn: Ascii<20>,
        /// MN: model number.
        24 => mn: Ascii<40>,
        /// FR: firmware revision.
        64 => fr: Ascii<8>,
        /// RAB: recommended arbitration burst.
        72 => rab: u8,
        /// IEEE: vendor OUI.
        73 => ieee: [u8; 3],
        /// CMIC: paths and sharing.
        76 => cmic: Cmic,
        /// MDTS: largest transfer, `2 ^ mdts` smallest pages; 0 for no limit.
        77 => mdts: u8,
        /// CNTLID: this controller.
        78 => cntlid: u16,
        /// VER: version, as property VS has it.
        80 => ver: u32,
        /// RTD3R: resume latency in microseconds.
        84 => rtd3r: u32,
        /// RTD3E: entry latency in microseconds.
        88 => rtd3e: u32,
        /// OAES: asynchronous events that can be switched on.
        92 => oaes: EventConfiguration,
        /// CTRATT: attributes.
        96 => ctratt: Ctratt,
        /// CNTRLTYPE: see [`ControllerType`].
        111 => cntrltype: u8,
        /// FGUID: FRU globally unique identifier.
        112 => fguid: [u8; 16],
        /// CRDT1: command retry delay 1 in units of 100 ms.
        128 => crdt1: u16,
        /// CRDT2: command retry delay 2 in units of 100 ms.
        130 => crdt2: u16,
        /// CRDT3: command retry delay 3 in units of 100 ms.
        132 => crdt3: u16,
        /// OACS: optional admin commands.
        256 => oacs: Oacs,
        /// ACL: Abort commands outstanding at a time.
        258 => acl: Count8,
        /// AERL: Asynchronous Event Requests outstanding at a time.
        259 => aerl: Count8,
        /// FRMW: firmware updates; bit 0 slot 1 is read only, bits 3:1 number of slots.
        260 => frmw: u8,
        /// LPA: log pages.
        261 => lpa: Lpa,
        /// ELPE: entries of the Error Information log.
        262 => elpe: Count8,
        /// NPSS: power states.
        263 => npss: Count8,
        /// AVSCC: vendor specific admin commands; bit 0 they have the common format.
        264 => avscc: u8,
        /// APSTA: autonomous power state transitions.
        265 => apsta: u8,
        /// WCTEMP: warning temperature in kelvins.
        266 => wctemp: u16,
        /// CCTEMP: critical temperature in kelvins.
        268 => cctemp: u16,
        /// TNVMCAP: capacity in bytes.
        280 => tnvmcap: u128,
        /// UNVMCAP: unallocated capacity in bytes.
        296 => unvmcap: u128,
        /// KAS: granularity of keep alive in units of 100 ms; 0 for no keep alive.
        320 => kas: u16,
        /// ANATT: longest ANA transition in seconds.
        342 => anatt: u8,
        /// ANACAP: what of ANA is reported.
        343 => anacap: u8,
        /// ANAGRPMAX: largest ANA group identifier.
        344 => anagrpmax: u32,
        /// NANAGRPID: ANA groups.
        348 => nanagrpid: u32,
        /// DOMAINID: domain of the controller.
        356 => domainid: u16,
        /// SQES: submission queue entry, `2 ^` bits 3:0 bytes required and `2 ^` bits 7:4 at most; 66h.
        512 => sqes: u8,
        /// CQES: completion queue entry, likewise; 44h.
        513 => cqes: u8,
        /// MAXCMD: commands outstanding on a queue at a time; mandatory over Fabrics.
        514 => maxcmd: u16,
        /// NN: largest valid namespace identifier.
        516 => nn: u32,
        /// ONCS: optional NVM commands.
        520 => oncs: Oncs,
        /// FUSES: fused operations.
        522 => fuses: Fuses,
        /// FNA: Format NVM attributes.
        524 => fna: u8,
        /// VWC: volatile write cache.
        525 => vwc: Vwc,
        /// AWUN: atomic write unit in blocks, 0's based.
        526 => awun: u16,
        /// AWUPF: atomic write unit at power failure in blocks, 0's based.
        528 => awupf: u16,
        /// ICSVSCC: vendor specific I/O commands; bit 0 they have the common format.
        530 => icsvscc: u8,
        /// NWPC: namespace write protection.
        531 => nwpc: u8,
        /// ACWU: atomic Compare and Write unit in blocks, 0's based.
        532 => acwu: u16,
        /// CDFS: Copy descriptor formats; bit n for format n.
        534 => cdfs: u16,
        /// SGLS: SGL support.
        536 => sgls: Sgls,
        /// MNAN: largest number of namespaces allowed, 0 for NN.
        540 => mnan: u32,
        /// MAXDNA: largest domain namespace attachments.
        544 => maxdna: u128,
        /// MAXCNA: largest I/O controller namespace attachments.
        560 => maxcna: u32,
        /// SUBNQN: name of the subsystem.
        768 => subnqn: PaddedText<256>,
        /// IOCCSZ: largest I/O command capsule in units of 16 bytes; 4 without in-capsule data.
        1792 => ioccsz: u32,
        /// IORCSZ: largest I/O response capsule in units of 16 bytes; 1.
        1796 => iorcsz: u32,
        /// ICDOFF: offset of in-capsule data behind the command in units of 16 bytes.
        1800 => icdoff: u16,
        /// FCATT: controller attributes.
        1802 => fcatt: u8,
        /// MSDBD: SGL data block descriptors in a capsule; 1 over TCP, 0 for no limit.
        1803 => msdbd: u8,
        /// OFCS: optional Fabrics commands.
        1804 => ofcs: Ofcs,
        /// DCTYPE: kind of discovery controller.
        1806 => dctype: u8,
        /// MP of power state 0: largest power in centiwatts.
        2048 => psd0_mp: u16,
    }
}

impl Controller {
    /// Bytes of the largest transfer, or `None` for no limit. `min_page_bytes` comes from
    /// [`crate::registers::Capabilities::min_page_bytes`].
    pub const fn max_transfer_bytes(&self, min_page_bytes: u64) -> Option<u64> {
        limit_bytes(self.mdts, min_page_bytes)
    }

    /// Bytes of data that an I/O command capsule has room for behind the command and ICDOFF.
    pub const fn in_capsule_bytes(&self) -> u64 {
        (self.ioccsz as u64 * 16).saturating_sub(64 + self.icdoff as u64 * 16)
    }
}

/// Bytes that a limit of `2 ^ exponent` smallest pages means; `None` for exponent 0, no limit, or for more than 64 bits
/// can say. This is the form of MDTS, VSL, WZSL and WUSL.
pub const fn limit_bytes(exponent: u8, min_page_bytes: u64) -> Option<u64> {
    match exponent {
        0 => None,
        exponent if exponent >= 64 => None,
        exponent => min_page_bytes.checked_mul(1 << exponent),
    }
}

layout! {
    /// Identify Controller for the NVM command set (NVM, "I/O Command Set specific Identify Controller data structure").
    pub struct NvmController[4096] {
        /// VSL: Verify size limit, as [`limit_bytes`]; 0 for no limit.
        0 => vsl: u8,
        /// WZSL: Write Zeroes size limit, as [`limit_bytes`]; 0 means MDTS to some hosts.
        1 => wzsl: u8,
        /// WUSL: Write Uncorrectable size limit, as [`limit_bytes`].
        2 => wusl: u8,
        /// DMRL: Dataset Management ranges, 0 for no limit.
        3 => dmrl: u8,
        /// DMRSL: blocks in one range of Dataset Management, 0 for no limit.
        4 => dmrsl: u32,
        /// DMSL: blocks in one Dataset Management command, 0 for no limit.
        8 => dmsl: u64,
        /// KPIOCAP: key per I/O.
        16 => kpiocap: u8,
        /// WZDSL: Write Zeroes with DEAC size limit, as [`limit_bytes`]; with ONCS bit 11.
        17 => wzdsl: u8,
        /// AOCS: admin optional command support.
        18 => aocs: u16,
        /// VER: version of the NVM command set specification, as property VS has it.
        20 => ver: u32,
    }
}
