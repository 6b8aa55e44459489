//! Numbers and layouts of the kernel's `linux/ublk_cmd.h` and, for protection information, `linux/fs.h`. Native byte
//! order.
//!
//! Data that the kernel shares with a server are checked like untrusted input: a descriptor decodes to a known
//! operation and possible numbers, or to `None`.

use bitflags::bitflags;

/// Bytes of a sector, whatever the size of blocks.
pub const SECTOR_BYTES: u64 = 512;
/// The maximum number of requests of one queue at once (`UBLK_MAX_QUEUE_DEPTH`).
pub const MAX_DEPTH: u16 = 4096;
/// Bytes of `struct ublksrv_io_desc`.
pub(crate) const DESCRIPTOR_BYTES: usize = 24;
/// Bytes of `struct ublksrv_ctrl_dev_info`.
pub(crate) const DEVICE_INFO_BYTES: usize = 64;
/// Bytes of `struct ublk_params` with the block of protection information (Linux 7.0).
pub(crate) const PARAMS_BYTES: usize = 152;
/// The same without that block: up to `struct ublk_param_discard`, which every kernel with ublk knows.
pub(crate) const OLD_PARAMS_BYTES: usize = 60;

/// `UBLKSRV_IO_BUF_OFFSET`: where the data of requests begin in the character device.
const BUFFERS_AT: u64 = 0x8000_0000;
/// `UBLK_TAG_OFF` and `UBLK_QID_OFF`: the bits of a position with the tag and the queue of a request.
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;
/// `UBLKSRV_IO_INTEGRITY_FLAG`: the position is in protection information.
const INTEGRITY_POSITION: u64 = 1 << 62;

bitflags! {
    /// What a kernel supports, and what a device was created with (`UBLK_F_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Features: u64 {
        /// The device outlives its server, and waits for the next one.
        const USER_RECOVERY = 1 << 3;
        /// Requests that the last server had not completed are sent to the next one.
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// Commands are numbered like `ioctl`s.
        const IOCTL_ENCODE = 1 << 6;
        /// The server copies data by reads and writes of the character device.
        const USER_COPY = 1 << 7;
        /// The size of the device can change while it exists.
        const UPDATE_SIZE = 1 << 10;
        /// Requests have protection information.
        const INTEGRITY = 1 << 16;
        const _ = !0;
    }
}

bitflags! {
    /// Attributes of a device (`UBLK_ATTR_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Attributes: u32 {
        /// It is read-only.
        const READ_ONLY = 1 << 0;
        /// It has a volatile cache, which a Flush empties.
        const VOLATILE_CACHE = 1 << 2;
        /// It supports writes with forced unit access.
        const FUA = 1 << 3;
        const _ = !0;
    }
}

/// The checksum in protection information (`LBMD_PI_CSUM_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntegrityChecksum {
    /// The Internet checksum.
    Ip,
    /// The CRC-16 of T10-DIF.
    Crc16,
    /// The CRC-64 of NVMe.
    Crc64,
}

impl IntegrityChecksum {
    const fn number(self) -> u8 {
        match self {
            IntegrityChecksum::Ip => 1,
            IntegrityChecksum::Crc16 => 2,
            IntegrityChecksum::Crc64 => 4,
        }
    }

    /// Bytes of one tuple.
    pub const fn tuple_bytes(self) -> u8 {
        match self {
            IntegrityChecksum::Ip | IntegrityChecksum::Crc16 => 8,
            IntegrityChecksum::Crc64 => 16,
        }
    }

    const ALL: [IntegrityChecksum; 3] = [IntegrityChecksum::Ip, IntegrityChecksum::Crc16, IntegrityChecksum::Crc64];
}

/// The parameters of a block device (`struct ublk_params`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Attributes.
    pub attributes: Attributes,
    /// Base-2 logarithm of the bytes of a block.
    pub block_shift: u8,
    /// Sectors of the device.
    pub capacity_sectors: u64,
    /// The maximum number of sectors of a read or write.
    pub max_transfer_sectors: u32,
    /// The maximum number of sectors that are discarded at once; 0 if unsupported.
    pub max_discard_sectors: u32,
    /// The maximum number of sectors that are zeroed at once; 0 if the kernel writes zeroes instead.
    pub max_zero_sectors: u32,
    /// Protection information: one tuple for each block, whose reference tag is the low bits of the address.
    pub integrity: Option<IntegrityChecksum>,
}

/// Types of parameters (`UBLK_PARAM_TYPE_*`).
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;
const INTEGRITY: u32 = 1 << 6;
/// `LBMD_PI_CAP_INTEGRITY` and `LBMD_PI_CAP_REFTAG`.
const INTEGRITY_FLAGS: u32 = 1 << 0 | 1 << 1;
/// Bytes of the application tag in a tuple.
const APPLICATION_TAG_BYTES: u8 = 2;
/// Offset of `struct ublk_param_integrity`.
const INTEGRITY_AT: usize = 136;

impl Params {
    /// The bytes of `struct ublk_params`.
    pub(crate) fn to_bytes(self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        let has_discard = self.max_discard_sectors > 0 || self.max_zero_sectors > 0;
        let types =
            BASIC | if has_discard { DISCARD } else { 0 } | if self.integrity.is_some() { INTEGRITY } else { 0 };
        put(&mut bytes, 0, &(PARAMS_BYTES as u32).to_ne_bytes());
        put(&mut bytes, 4, &types.to_ne_bytes());
        put(&mut bytes, 8, &self.attributes.bits().to_ne_bytes());
        // Logical and physical block, optimal and least transfer.
        put(&mut bytes, 12, &[self.block_shift; 4]);
        put(&mut bytes, 16, &self.max_transfer_sectors.to_ne_bytes());
        put(&mut bytes, 24, &self.capacity_sectors.to_ne_bytes());
        if has_discard {
            put(&mut bytes, 44, &(1_u32 << self.block_shift).to_ne_bytes());
            put(&mut bytes, 48, &self.max_discard_sectors.to_ne_bytes());
            put(&mut bytes, 52, &self.max_zero_sectors.to_ne_bytes());
            // The driver accepts one range at a time.
            put(&mut bytes, 56, &u16::from(self.max_discard_sectors > 0).to_ne_bytes());
        }
        if let Some(checksum) = self.integrity {
            put(&mut bytes, INTEGRITY_AT, &INTEGRITY_FLAGS.to_ne_bytes());
            let tuple = [self.block_shift, checksum.tuple_bytes(), 0, checksum.number(), APPLICATION_TAG_BYTES];
            put(&mut bytes, INTEGRITY_AT + 6, &tuple);
        }
        bytes
    }

    /// Decodes the parameters of a device from the kernel; `None` if this crate does not create such devices.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Params> {
        let types = u32_at(bytes, 4)?;
        let has = |kind| types & kind != 0;
        let discard = |at| if has(DISCARD) { u32_at(bytes, at) } else { Some(0) };
        let checksum = |number: u8| IntegrityChecksum::ALL.into_iter().find(|checksum| checksum.number() == number);
        let integrity = if has(INTEGRITY) { Some(checksum(*bytes.get(INTEGRITY_AT + 9)?)?) } else { None };
        Some(Params {
            attributes: Attributes::from_bits_retain(u32_at(bytes, 8)?),
            block_shift: *bytes.get(12).filter(|_| has(BASIC))?,
            capacity_sectors: u64_at(bytes, 24)?,
            max_transfer_sectors: u32_at(bytes, 16)?,
            max_discard_sectors: discard(48)?,
            max_zero_sectors: discard(52)?,
            integrity,
        })
    }
}

/// State of a device (`UBLK_S_DEV_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// Created but not started, or stopped.
    Dead,
    /// In use.
    Live,
    /// Its server is gone, and requests wait for the next one.
    Quiesced,
    /// Its server is gone, and requests fail until there is another one.
    FailIo,
    /// A state of a later kernel.
    Unknown(u16),
}

/// The driver's information about a device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// N of `/dev/ublkbN`; `u32::MAX` for the next free one.
    pub number: u32,
    /// The number of queues.
    pub queues: u16,
    /// The number of requests of a queue at once.
    pub depth: u16,
    /// Its state.
    pub state: DeviceState,
    /// The maximum number of bytes of a request.
    pub max_transfer_bytes: u32,
    /// The process that serves it, if any does.
    pub server_pid: Option<u32>,
    /// The features that it was created with.
    pub features: Features,
    /// A number that its server chose, and the driver keeps.
    pub server_flags: u64,
}

impl DeviceInfo {
    pub(crate) fn to_bytes(self) -> [u8; DEVICE_INFO_BYTES] {
        let mut bytes = [0; DEVICE_INFO_BYTES];
        put(&mut bytes, 0, &self.queues.to_ne_bytes());
        put(&mut bytes, 2, &self.depth.to_ne_bytes());
        put(&mut bytes, 8, &self.max_transfer_bytes.to_ne_bytes());
        put(&mut bytes, 12, &self.number.to_ne_bytes());
        put(&mut bytes, 24, &self.features.bits().to_ne_bytes());
        put(&mut bytes, 32, &self.server_flags.to_ne_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<DeviceInfo> {
        Some(DeviceInfo {
            queues: u16_at(bytes, 0)?,
            depth: u16_at(bytes, 2)?,
            state: match u16_at(bytes, 4)? {
                0 => DeviceState::Dead,
                1 => DeviceState::Live,
                2 => DeviceState::Quiesced,
                3 => DeviceState::FailIo,
                other => DeviceState::Unknown(other),
            },
            max_transfer_bytes: u32_at(bytes, 8)?,
            number: u32_at(bytes, 12)?,
            // Signed in the kernel: -1 for none.
            server_pid: u32_at(bytes, 16).filter(|pid| (1..=i32::MAX as u32).contains(pid)),
            features: Features::from_bits_retain(u64_at(bytes, 24)?),
            server_flags: u64_at(bytes, 32)?,
        })
    }
}

/// What a request does (`UBLK_IO_OP_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestOperation {
    /// Read.
    Read,
    /// Write; with `fua`, durable before it completes.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Flush. It has no sectors.
    Flush,
    /// Discard.
    Discard,
    /// Zero.
    WriteZeroes {
        /// The space may be deallocated.
        may_unmap: bool,
        /// Force unit access.
        fua: bool,
    },
}

/// A request, as the driver describes it (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// What it does.
    pub operation: RequestOperation,
    /// It has protection information.
    pub has_tags: bool,
    /// Its first sector.
    pub first_sector: u64,
    /// The number of its sectors.
    pub sectors: u32,
}

const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;
const HAS_INTEGRITY: u32 = 1 << 18;

impl Descriptor {
    /// Decodes a descriptor; `None` for an unknown operation.
    pub fn from_bytes(bytes: &[u8; DESCRIPTOR_BYTES]) -> Option<Descriptor> {
        let flags = u32_at(bytes, 0)?;
        let fua = flags & FUA != 0;
        let operation = match flags & 0xFF {
            0 => RequestOperation::Read,
            1 => RequestOperation::Write { fua },
            2 => RequestOperation::Flush,
            3 => RequestOperation::Discard,
            5 => RequestOperation::WriteZeroes { may_unmap: flags & NO_UNMAP == 0, fua },
            _ => return None,
        };
        Some(Descriptor {
            operation,
            has_tags: flags & HAS_INTEGRITY != 0,
            first_sector: u64_at(bytes, 8)?,
            sectors: u32_at(bytes, 4)?,
        })
    }
}

/// The position of the data of a request in the character device, `offset` bytes into the data.
pub(crate) const fn data_position(queue: u16, tag: u16, offset: u32) -> u64 {
    BUFFERS_AT + ((queue as u64) << QUEUE_SHIFT | (tag as u64) << TAG_SHIFT | offset as u64)
}

/// The same for its protection information.
pub(crate) const fn tags_position(queue: u16, tag: u16, offset: u32) -> u64 {
    data_position(queue, tag, offset) | INTEGRITY_POSITION
}

/// The number of a command: `_IOR('u', number, ..)` or `_IOWR('u', number, ..)` with the bytes of its structure.
const fn command(is_written: bool, number: u32, bytes: u32) -> u32 {
    const READ: u32 = 2 << 30;
    const READ_WRITE: u32 = 3 << 30;
    (if is_written { READ_WRITE } else { READ }) | bytes << 16 | (b'u' as u32) << 8 | number
}

/// Commands for the control device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ControlCommand {
    AddDevice,
    DeleteDevice,
    DeleteDeviceLater,
    UpdateSize,
    StartDevice,
    StopDevice,
    SetParams,
    GetParams,
    StartRecovery,
    EndRecovery,
    GetDeviceInfo,
    GetFeatures,
}

impl ControlCommand {
    pub(crate) const fn number(self) -> u32 {
        const BYTES: u32 = 32;
        match self {
            ControlCommand::GetDeviceInfo => command(false, 0x02, BYTES),
            ControlCommand::AddDevice => command(true, 0x04, BYTES),
            ControlCommand::DeleteDevice => command(true, 0x05, BYTES),
            ControlCommand::StartDevice => command(true, 0x06, BYTES),
            ControlCommand::StopDevice => command(true, 0x07, BYTES),
            ControlCommand::SetParams => command(true, 0x08, BYTES),
            ControlCommand::GetParams => command(false, 0x09, BYTES),
            ControlCommand::StartRecovery => command(true, 0x10, BYTES),
            ControlCommand::EndRecovery => command(true, 0x11, BYTES),
            ControlCommand::GetFeatures => command(false, 0x13, BYTES),
            ControlCommand::DeleteDeviceLater => command(false, 0x14, BYTES),
            ControlCommand::UpdateSize => command(true, 0x15, BYTES),
        }
    }
}

/// `struct ublksrv_ctrl_cmd`, in the 80 bytes of a large submission.
pub(crate) fn control_payload(device: u32, address: u64, bytes: u16, data: u64) -> [u8; 80] {
    let mut payload = [0; 80];
    put(&mut payload, 0, &device.to_ne_bytes());
    // The command is not for a queue.
    put(&mut payload, 4, &u16::MAX.to_ne_bytes());
    put(&mut payload, 6, &bytes.to_ne_bytes());
    put(&mut payload, 8, &address.to_ne_bytes());
    put(&mut payload, 16, &data.to_ne_bytes());
    payload
}

/// `UBLK_U_IO_FETCH_REQ` and `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
pub(crate) const FETCH: u32 = command(true, 0x20, 16);
pub(crate) const COMMIT_AND_FETCH: u32 = command(true, 0x21, 16);

/// `struct ublksrv_io_cmd`. The address stays 0: data are copied by reads and writes.
pub(crate) fn io_payload(queue: u16, tag: u16, result: i32) -> [u8; 16] {
    let mut payload = [0; 16];
    put(&mut payload, 0, &queue.to_ne_bytes());
    put(&mut payload, 2, &tag.to_ne_bytes());
    put(&mut payload, 4, &result.to_ne_bytes());
    payload
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARAMS: Params = Params {
        attributes: Attributes::VOLATILE_CACHE.union(Attributes::FUA),
        block_shift: 12,
        capacity_sectors: 0x0102_0304_0506,
        max_transfer_sectors: 1024,
        max_discard_sectors: 77,
        max_zero_sectors: 99,
        integrity: Some(IntegrityChecksum::Crc64),
    };

    #[test]
    fn numbers_of_commands_are_those_of_the_header() {
        // As a C compiler evaluates the macros of linux/ublk_cmd.h.
        assert_eq!(ControlCommand::AddDevice.number(), 0xC020_7504);
        assert_eq!(ControlCommand::GetDeviceInfo.number(), 0x8020_7502);
        assert_eq!(ControlCommand::GetFeatures.number(), 0x8020_7513);
        assert_eq!(ControlCommand::DeleteDeviceLater.number(), 0x8020_7514);
        assert_eq!(ControlCommand::UpdateSize.number(), 0xC020_7515);
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xC010_7520, 0xC010_7521));
        assert_eq!(data_position(0, 0, 0), 0x8000_0000);
        assert_eq!(data_position(1, 2, 3), 0x8000_0000 + (1 << 41) + (2 << 25) + 3);
        assert_eq!(tags_position(0, 1, 8), 1 << 62 | (0x8000_0000 + (1 << 25) + 8));
    }

    #[test]
    fn params_lie_where_the_kernel_has_them() {
        let bytes = PARAMS.to_bytes();
        assert_eq!(u32_at(&bytes, 0), Some(152));
        assert_eq!(u32_at(&bytes, 4), Some(0x43), "basic, discard, integrity");
        assert_eq!(&bytes[12..16], &[12; 4]);
        assert_eq!(u64_at(&bytes, 24), Some(0x0102_0304_0506));
        assert_eq!((u32_at(&bytes, 44), u32_at(&bytes, 48), u32_at(&bytes, 52)), (Some(4096), Some(77), Some(99)));
        assert_eq!(u16_at(&bytes, 56), Some(1));
        assert_eq!((u32_at(&bytes, 136), &bytes[142..147]), (Some(3), &[12, 16, 0, 4, 2][..]));
        assert_eq!(Params::from_bytes(&bytes), Some(PARAMS));
        let plain = Params { integrity: None, max_discard_sectors: 0, max_zero_sectors: 0, ..PARAMS };
        assert_eq!(u32_at(&plain.to_bytes(), 4), Some(1));
        assert_eq!(Params::from_bytes(&plain.to_bytes()[..OLD_PARAMS_BYTES]), Some(plain));
        assert_eq!(Params::from_bytes(&bytes[..OLD_PARAMS_BYTES]), None, "it says more than is there");
    }

    #[test]
    fn device_info_lies_where_the_kernel_has_it() {
        let info = DeviceInfo {
            number: 7,
            queues: 2,
            depth: 64,
            state: DeviceState::Dead,
            max_transfer_bytes: 1 << 19,
            server_pid: None,
            features: Features::USER_COPY | Features::INTEGRITY,
            server_flags: 0xABCD,
        };
        let mut bytes = info.to_bytes();
        assert_eq!(DeviceInfo::from_bytes(&bytes), Some(info));
        assert_eq!(u64_at(&bytes, 24), Some(0x1_0080));
        put(&mut bytes, 4, &2_u16.to_ne_bytes());
        put(&mut bytes, 16, &1234_i32.to_ne_bytes());
        let seen = DeviceInfo::from_bytes(&bytes).unwrap();
        assert_eq!((seen.state, seen.server_pid), (DeviceState::Quiesced, Some(1234)));
        put(&mut bytes, 16, &(-1_i32).to_ne_bytes());
        assert_eq!(DeviceInfo::from_bytes(&bytes).unwrap().server_pid, None);
        assert_eq!(DeviceInfo::from_bytes(&bytes[..39]), None);
    }

    #[test]
    fn descriptors_say_what_a_request_is() {
        let described = |flags: u32| {
            let mut bytes = [0; DESCRIPTOR_BYTES];
            put(&mut bytes, 0, &flags.to_ne_bytes());
            put(&mut bytes, 4, &16_u32.to_ne_bytes());
            put(&mut bytes, 8, &800_u64.to_ne_bytes());
            Descriptor::from_bytes(&bytes)
        };
        let read = Descriptor { operation: RequestOperation::Read, has_tags: true, first_sector: 800, sectors: 16 };
        assert_eq!(described(1 << 18), Some(read));
        let operation = |flags| described(flags).map(|descriptor| descriptor.operation);
        assert_eq!(operation(1 | 1 << 13), Some(RequestOperation::Write { fua: true }));
        assert_eq!(operation(5), Some(RequestOperation::WriteZeroes { may_unmap: true, fua: false }));
        assert_eq!(operation(5 | 1 << 15), Some(RequestOperation::WriteZeroes { may_unmap: false, fua: false }));
        assert_eq!((operation(4), operation(6), operation(0xFF)), (None, None, None), "WRITE SAME, and unknown ones");
    }

    proptest! {
        #[test]
        fn whatever_the_kernel_says_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Params::from_bytes(&bytes), DeviceInfo::from_bytes(&bytes));
            if let Some(bytes) = bytes.first_chunk() {
                let _ = Descriptor::from_bytes(bytes);
            }
        }
    }
}
