//! The controller properties that Fabrics read and write: CAP, VS, CC, CSTS (Base, "Controller Properties").

use crate::wire::codes;

codes! {
    /// Offsets of the properties (Base, "Property Definition").
    pub enum Property: u32 {
        /// CAP: controller capabilities, 8 bytes.
        Capabilities = 0x00,
        /// VS: version, 4 bytes.
        Version = 0x08,
        /// CC: controller configuration, 4 bytes.
        Configuration = 0x14,
        /// CSTS: controller status, 4 bytes.
        Status = 0x1C,
        /// NSSR: NVM subsystem reset, 4 bytes.
        SubsystemReset = 0x20,
        /// CRTO: controller ready timeouts, 4 bytes.
        ReadyTimeouts = 0x68,
    }
}

impl Property {
    /// Bytes of the property: 4 or 8.
    pub const fn bytes(self) -> usize {
        match self {
            Property::Capabilities => 8,
            _ => 4,
        }
    }
}

/// CAP: what the controller can do (Base, "Controller Capabilities").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// MQES: entries in the largest queue, 1 to 65,536 (0's based on the wire).
    pub max_queue_entries: u32,
    /// CQR: queues must be physically contiguous; 1 over Fabrics.
    pub contiguous_queues: bool,
    /// TO: longest wait for CSTS.RDY, in units of 500 ms.
    pub timeout_500ms: u8,
    /// NSSRS: the subsystem can be reset through NSSR.
    pub subsystem_reset: bool,
    /// CSS: bit 0 NVM command set, bit 6 several command sets (Identify CNS 1Ch), bit 7 none.
    pub command_sets: u8,
    /// MPSMIN: smallest page is `2 ^ (12 + mpsmin)` bytes. MDTS counts in these pages.
    pub mpsmin: u8,
    /// MPSMAX: largest page is `2 ^ (12 + mpsmax)` bytes.
    pub mpsmax: u8,
    /// CRMS: controller ready modes; bit 0 is Ready With Media, bit 1 Ready Independent of Media.
    pub ready_modes: u8,
}

impl Capabilities {
    /// CSS bit 0: the NVM command set.
    pub const NVM_COMMAND_SET: u8 = 1;
    /// CSS bit 6: one or more I/O command sets, listed by Identify CNS 1Ch. Makes Linux set CC.CSS to 110b.
    pub const SEVERAL_COMMAND_SETS: u8 = 1 << 6;
    /// CSS bit 7: no I/O command set, as discovery controllers have it.
    pub const NO_COMMAND_SET: u8 = 1 << 7;

    /// The property's value; fields too large lose their high bits.
    pub const fn bits(&self) -> u64 {
        let entries = if self.max_queue_entries == 0 { 0 } else { self.max_queue_entries - 1 };
        (entries as u64 & 0xFFFF)
            | (self.contiguous_queues as u64) << 16
            | (self.timeout_500ms as u64) << 24
            | (self.subsystem_reset as u64) << 36
            | (self.command_sets as u64) << 37
            | (self.mpsmin as u64 & 0xF) << 48
            | (self.mpsmax as u64 & 0xF) << 52
            | (self.ready_modes as u64 & 3) << 59
    }

    /// What a value of the property says.
    pub const fn from_bits(bits: u64) -> Capabilities {
        Capabilities {
            max_queue_entries: (bits & 0xFFFF) as u32 + 1,
            contiguous_queues: bits >> 16 & 1 != 0,
            timeout_500ms: (bits >> 24) as u8,
            subsystem_reset: bits >> 36 & 1 != 0,
            command_sets: (bits >> 37) as u8,
            mpsmin: (bits >> 48) as u8 & 0xF,
            mpsmax: (bits >> 52) as u8 & 0xF,
            ready_modes: (bits >> 59) as u8 & 3,
        }
    }

    /// Bytes of the smallest page, in which MDTS and the other limits of Identify count.
    pub const fn min_page_bytes(&self) -> u64 {
        1 << (12 + (self.mpsmin as u32 & 0xF))
    }
}

/// VS: the version of the base specification (Base, "Version").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// MJR: major.
    pub major: u16,
    /// MNR: minor.
    pub minor: u8,
    /// TER: tertiary.
    pub tertiary: u8,
}

impl Version {
    /// 2.1.
    pub const V2_1: Version = Version { major: 2, minor: 1, tertiary: 0 };

    /// The property's value, also found in Identify Controller.
    pub const fn bits(self) -> u32 {
        (self.major as u32) << 16 | (self.minor as u32) << 8 | self.tertiary as u32
    }

    /// What a value of the property says.
    pub const fn from_bits(bits: u32) -> Version {
        Version { major: (bits >> 16) as u16, minor: (bits >> 8) as u8, tertiary: bits as u8 }
    }
}

/// What the host wants of the controller on its way out (Base, field CC.SHN).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ShutdownNotification {
    /// 00b: nothing.
    None,
    /// 01b: normal shutdown.
    Normal,
    /// 10b: abrupt shutdown.
    Abrupt,
    /// 11b: reserved.
    Reserved,
}

/// CC: how the host configures the controller (Base, "Controller Configuration").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Configuration {
    /// EN: the controller processes commands.
    pub enable: bool,
    /// CSS: 000b NVM command set, 110b all supported command sets, 111b admin only.
    pub command_set: u8,
    /// MPS: page is `2 ^ (12 + mps)` bytes.
    pub mps: u8,
    /// AMS: arbitration.
    pub ams: u8,
    /// SHN: shutdown notification.
    pub shutdown: ShutdownNotification,
    /// IOSQES: I/O submission queue entry is `2 ^ iosqes` bytes; 6.
    pub iosqes: u8,
    /// IOCQES: I/O completion queue entry is `2 ^ iocqes` bytes; 4.
    pub iocqes: u8,
    /// CRIME: ready independent of media.
    pub ready_independent_of_media: bool,
}

impl Configuration {
    /// The property's value; fields too large lose their high bits.
    pub const fn bits(&self) -> u32 {
        self.enable as u32
            | (self.command_set as u32 & 7) << 4
            | (self.mps as u32 & 0xF) << 7
            | (self.ams as u32 & 7) << 11
            | (self.shutdown as u32) << 14
            | (self.iosqes as u32 & 0xF) << 16
            | (self.iocqes as u32 & 0xF) << 20
            | (self.ready_independent_of_media as u32) << 24
    }

    /// What a value of the property says.
    pub const fn from_bits(bits: u32) -> Configuration {
        Configuration {
            enable: bits & 1 != 0,
            command_set: (bits >> 4) as u8 & 7,
            mps: (bits >> 7) as u8 & 0xF,
            ams: (bits >> 11) as u8 & 7,
            shutdown: match bits >> 14 & 3 {
                0 => ShutdownNotification::None,
                1 => ShutdownNotification::Normal,
                2 => ShutdownNotification::Abrupt,
                _ => ShutdownNotification::Reserved,
            },
            iosqes: (bits >> 16) as u8 & 0xF,
            iocqes: (bits >> 20) as u8 & 0xF,
            ready_independent_of_media: bits >> 24 & 1 != 0,
        }
    }
}

/// How far a shutdown is (Base, field CSTS.SHST).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ShutdownStatus {
    /// 00b: none requested.
    #[default]
    Normal,
    /// 01b: in progress.
    InProgress,
    /// 10b: done.
    Complete,
    /// 11b: reserved.
    Reserved,
}

/// CSTS: the state of the controller (Base, "Controller Status").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ControllerStatus {
    /// RDY: commands are processed.
    pub ready: bool,
    /// CFS: a fatal error; only a reset helps.
    pub fatal: bool,
    /// SHST: how far a shutdown is.
    pub shutdown: ShutdownStatus,
    /// NSSRO: the subsystem was reset.
    pub subsystem_reset_occurred: bool,
    /// PP: processing is paused.
    pub processing_paused: bool,
}

impl ControllerStatus {
    /// The property's value.
    pub const fn bits(&self) -> u32 {
        self.ready as u32
            | (self.fatal as u32) << 1
            | (self.shutdown as u32) << 2
            | (self.subsystem_reset_occurred as u32) << 4
            | (self.processing_paused as u32) << 5
    }

    /// What a value of the property says.
    pub const fn from_bits(bits: u32) -> ControllerStatus {
        ControllerStatus {
            ready: bits & 1 != 0,
            fatal: bits & 2 != 0,
            shutdown: match bits >> 2 & 3 {
                0 => ShutdownStatus::Normal,
                1 => ShutdownStatus::InProgress,
                2 => ShutdownStatus::Complete,
                _ => ShutdownStatus::Reserved,
            },
            subsystem_reset_occurred: bits & 16 != 0,
            processing_paused: bits & 32 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Linux hosts write, and what they wait for.
    #[test]
    fn the_values_that_linux_writes() {
        let enabled = Configuration::from_bits(0x0046_0001);
        assert!(enabled.enable && enabled.shutdown == ShutdownNotification::None);
        assert_eq!((enabled.iosqes, enabled.iocqes, enabled.command_set, enabled.mps), (6, 4, 0, 0));
        assert_eq!(Configuration::from_bits(0x0046_0060).command_set, 6);
        assert_eq!(Configuration::from_bits(0x0046_4001).shutdown, ShutdownNotification::Normal);
        let complete = ControllerStatus { shutdown: ShutdownStatus::Complete, ..ControllerStatus::from_bits(1) };
        assert_eq!(complete.bits(), 9);
    }

    #[test]
    fn every_field_stands_in_its_bits() {
        let capabilities = Capabilities {
            max_queue_entries: 128,
            contiguous_queues: true,
            timeout_500ms: 30,
            subsystem_reset: false,
            command_sets: Capabilities::NVM_COMMAND_SET,
            mpsmin: 0,
            mpsmax: 4,
            ready_modes: 1,
        };
        assert_eq!(capabilities.bits(), 127 | 1 << 16 | 30 << 24 | 1 << 37 | 4 << 52 | 1 << 59);
        assert_eq!(Capabilities::from_bits(capabilities.bits()), capabilities);
        assert_eq!(capabilities.min_page_bytes(), 4096);
        assert_eq!(Version::V2_1.bits(), 0x0002_0100);
        assert_eq!(Version::from_bits(0x0001_0300), Version { major: 1, minor: 3, tertiary: 0 });
    }

    proptest::proptest! {
        #[test]
        fn values_round_trip_in_the_bits_that_mean_something(bits: u64) {
            let capabilities = Capabilities::from_bits(bits);
            assert_eq!(Capabilities::from_bits(capabilities.bits()), capabilities);
            assert_eq!(capabilities.bits() & !bits, 0);
            let bits = bits as u32;
            assert_eq!(Configuration::from_bits(bits).bits(), bits & 0x01FF_FFF1);
            assert_eq!(ControllerStatus::from_bits(bits).bits(), bits & 0x3F);
            assert_eq!(Version::from_bits(bits).bits(), bits);
        }
    }
}
