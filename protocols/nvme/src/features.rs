//! Features: the values of Get and Set Features that hosts use (Base, "Feature Values"; NVM, "Feature Values"), and the
//! asynchronous events that one of them switches on.

use crate::error::Invalid;
use crate::wire::{bit, bits, codes, flags, layout};

codes! {
    /// Feature identifiers (Base and NVM, field FID).
    pub enum FeatureId: u8 {
        /// Arbitration.
        Arbitration = 0x01,
        /// Power Management.
        PowerManagement = 0x02,
        /// Temperature Threshold.
        TemperatureThreshold = 0x04,
        /// Error Recovery: time limit, and DULBE.
        ErrorRecovery = 0x05,
        /// Volatile Write Cache.
        VolatileWriteCache = 0x06,
        /// Number of Queues.
        NumberOfQueues = 0x07,
        /// Write Atomicity Normal.
        WriteAtomicity = 0x0A,
        /// Asynchronous Event Configuration.
        AsynchronousEvents = 0x0B,
        /// Timestamp; has 8 bytes of data.
        Timestamp = 0x0E,
        /// Keep Alive Timer.
        KeepAliveTimer = 0x0F,
        /// LBA Status Information Report Interval.
        LbaStatusInterval = 0x15,
        /// Host Behavior Support; has 512 bytes of data.
        HostBehavior = 0x16,
        /// Host Identifier; has 8 or 16 bytes of data.
        HostIdentifier = 0x81,
        /// Label of a group: a vendor specific feature of sealblock, see [`crate::extensions::ReservedArea`].
        ReservedGroupLabel = 0xC0,
        /// State of a scrub: a vendor specific feature of sealblock, see [`crate::extensions::ReservedArea`].
        ReservedScrubState = 0xC1,
        /// Bitmap pages of a group, the page's number in dword 11: see [`crate::extensions::ReservedArea`].
        ReservedBitmap = 0xC2,
        /// Ends another controller of the same host, whose identifier is in dword 11: a vendor specific feature of sealblock, see
        /// [`crate::extensions::Extensions::FENCE`].
        EndController = 0xC3,
    }
}

flags! {
    /// What can be done with a feature: the answer to [`crate::admin::FeatureSelect::Capabilities`].
    pub struct FeatureCapabilities(u32) {
        /// Each namespace has its own value.
        NAMESPACE_SPECIFIC = 1,
        /// The value can be changed.
        CHANGEABLE = 2,
    }
}

flags! {
    /// Which events are reported: Asynchronous Event Configuration, and OAES of Identify Controller for bits 8 and up.
    pub struct EventConfiguration(u32) {
        /// SMART / health: available spare is low.
        SPARE = 0,
        /// SMART / health: temperature.
        TEMPERATURE = 1,
        /// SMART / health: the subsystem's reliability is degraded.
        RELIABILITY = 2,
        /// SMART / health: the media is read only.
        READ_ONLY = 3,
        /// SMART / health: volatile memory backup failed.
        BACKUP_FAILED = 4,
        /// Namespace Attribute Notices.
        NAMESPACE_ATTRIBUTE = 8,
        /// LBA Status Information Notices.
        LBA_STATUS = 13,
        /// Discovery Log Page Change Notification.
        DISCOVERY_LOG_CHANGE = 31,
    }
}

flags! {
    /// What changing a feature does: an entry of the page Feature Identifiers Supported and Effects.
    pub struct FeatureEffects(u32) {
        /// FSUPP: the feature is supported.
        SUPPORTED = 0,
        /// FSP: its value belongs to a namespace.
        NAMESPACE_SCOPE = 20,
        /// FSP: its value belongs to a controller.
        CONTROLLER_SCOPE = 21,
    }
}

/// The page Feature Identifiers Supported and Effects (Base, clause of the same name): a dword for each identifier.
pub fn feature_effects(features: impl IntoIterator<Item = (FeatureId, FeatureEffects)>) -> [u8; 1024] {
    let mut page = [0; 1024];
    for (feature, effects) in features {
        let at = usize::from(feature.code()) * 4;
        page[at..at + 4].copy_from_slice(&(effects | FeatureEffects::SUPPORTED).bits().to_le_bytes());
    }
    page
}

/// Number of Queues: I/O queues without the admin queue, 1 to 65,535 each (0's based on the wire; Base, "Number of
/// Queues").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumberOfQueues {
    /// NSQR or NSQA: submission queues.
    pub submission: u32,
    /// NCQR or NCQA: completion queues.
    pub completion: u32,
}

impl NumberOfQueues {
    /// Dword 11 of the command, or dword 0 of the completion; numbers outside 1 to 65,535 become the nearest legal one.
    pub fn bits(self) -> u32 {
        (self.submission.clamp(1, 65_535) - 1) | (self.completion.clamp(1, 65_535) - 1) << 16
    }

    /// The queues that dword 11 requests; refuses 65,536 queues of a kind, as the clause requires.
    pub fn from_bits(bits: u32) -> Result<NumberOfQueues, Invalid> {
        let (submission, completion) = ((bits & 0xFFFF) + 1, (bits >> 16) + 1);
        match (submission, completion) {
            (65_536, _) => Err(Invalid::field("NSQR", 11, 0)),
            (_, 65_536) => Err(Invalid::field("NCQR", 11, 16)),
            _ => Ok(NumberOfQueues { submission, completion }),
        }
    }
}

/// Temperature Threshold (Base, "Temperature Threshold").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TemperatureThreshold {
    /// TMPTH: the threshold in kelvins.
    pub kelvins: u16,
    /// TMPSEL: which sensor; 0 is the composite temperature, 1 to 8 sensors, Fh all.
    pub sensor: u8,
    /// THSEL: whether it is the threshold below which is too cold.
    pub under: bool,
}

impl TemperatureThreshold {
    /// Dword 11 of the command, or dword 0 of the answer.
    pub const fn bits(self) -> u32 {
        self.kelvins as u32 | (self.sensor as u32 & 0xF) << 16 | (self.under as u32) << 20
    }

    /// What the dword says; reserved threshold types are refused.
    pub fn from_bits(dword: u32) -> Result<TemperatureThreshold, Invalid> {
        if bits(dword, 20, 2) > 1 {
            return Err(Invalid::field("THSEL", 11, 20));
        }
        let sensor = bits(dword, 16, 4) as u8;
        Ok(TemperatureThreshold { kelvins: dword as u16, sensor, under: bit(dword, 20) })
    }
}

/// Whether the volatile write cache is used (Base, "Volatile Write Cache", bit WCE).
pub const fn write_cache_enabled(dword: u32) -> bool {
    bit(dword, 0)
}

/// LBA Status Information Report Interval (NVM, "LBA Status Information Attributes").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LbaStatusInterval {
    /// LSIRI: how long reports are held back at least, in units of 100 ms.
    pub report_100ms: u16,
    /// LSIPI: how often the controller looks, in units of 100 ms.
    pub poll_100ms: u16,
}

impl LbaStatusInterval {
    /// Dword 11 of the command, or dword 0 of the answer.
    pub const fn bits(self) -> u32 {
        self.report_100ms as u32 | (self.poll_100ms as u32) << 16
    }

    /// What the dword says.
    pub const fn from_bits(bits: u32) -> LbaStatusInterval {
        LbaStatusInterval { report_100ms: bits as u16, poll_100ms: (bits >> 16) as u16 }
    }
}

layout! {
    /// Data of the Timestamp feature (Base, "Timestamp").
    pub struct Timestamp[8] {
        /// Milliseconds since 1970-01-01 UTC, low 32 bits of 48.
        0 => low_ms: u32,
        /// High 16 bits of the milliseconds.
        4 => high_ms: u16,
        /// Bit 0: the clock may have stopped; bits 3:1: 0 counted from reset, 1 set by the host.
        6 => attributes: u8,
    }
}

impl Timestamp {
    /// This time, cut to 48 bits, as a controller reports it after a host has set it.
    pub const fn set_by_host(ms: u64) -> Timestamp {
        Timestamp { low_ms: ms as u32, high_ms: (ms >> 32) as u16, attributes: 1 << 1 }
    }

    /// Milliseconds since 1970-01-01 UTC, or since reset.
    pub const fn ms(&self) -> u64 {
        self.low_ms as u64 | (self.high_ms as u64) << 32
    }
}

layout! {
    /// Data of the Host Behavior Support feature (Base, "Host Behavior Support").
    pub struct HostBehavior[512] {
        /// ACRE: the host understands Command Interrupted and command retry delays.
        0 => acre: u8,
        /// ETDAS: extended telemetry.
        1 => etdas: u8,
        /// LBAFEE: the host understands extended LBA formats, so PI formats with other than 16-bit guards may be shown.
        2 => lbafee: u8,
        /// HDISNS: host dispersed namespaces.
        3 => hdisns: u8,
        /// CDFE: Copy descriptor formats that the host uses; bits 2 to 4 for formats 2h to 4h.
        4 => cdfe: u16,
    }
}

/// The answer to an Asynchronous Event Request (Base, "Asynchronous Event Request command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsynchronousEvent {
    /// Bits 2:0: type of event; 0 error, 1 SMART / health, 2 notice, 6 command set specific.
    pub kind: u8,
    /// Bits 15:8: what happened, by type.
    pub information: u8,
    /// Bits 23:16: the log page to read, which also clears the event.
    pub log_page: u8,
}

impl AsynchronousEvent {
    /// Notice: the namespaces changed; read Changed Namespace List.
    pub const NAMESPACE_CHANGED: AsynchronousEvent = AsynchronousEvent { kind: 2, information: 0x00, log_page: 0x04 };
    /// Notice: damaged blocks were found; read LBA Status Information.
    pub const LBA_STATUS: AsynchronousEvent = AsynchronousEvent { kind: 2, information: 0x05, log_page: 0x0E };
    /// Notice: the discovery log changed; read Discovery.
    pub const DISCOVERY_CHANGED: AsynchronousEvent = AsynchronousEvent { kind: 2, information: 0xF0, log_page: 0x70 };
    /// SMART / health: reliability is degraded; read SMART / Health Information.
    pub const RELIABILITY: AsynchronousEvent = AsynchronousEvent { kind: 1, information: 0x00, log_page: 0x02 };

    /// Dword 0 of the answer.
    pub const fn dword0(self) -> u32 {
        self.kind as u32 & 7 | (self.information as u32) << 8 | (self.log_page as u32) << 16
    }

    /// What dword 0 says.
    pub const fn from_dword0(dword0: u32) -> AsynchronousEvent {
        let (information, log_page) = ((dword0 >> 8) as u8, (dword0 >> 16) as u8);
        AsynchronousEvent { kind: dword0 as u8 & 7, information, log_page }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_in_their_bits() {
        let queues = NumberOfQueues { submission: 4, completion: 6 };
        assert_eq!((queues.bits(), NumberOfQueues::from_bits(0x0005_0003)), (0x0005_0003, Ok(queues)));
        let threshold = TemperatureThreshold { kelvins: 343, sensor: 0, under: true };
        assert_eq!((threshold.bits(), TemperatureThreshold::from_bits(0x0010_0157)), (0x0010_0157, Ok(threshold)));
        assert_eq!(AsynchronousEvent::LBA_STATUS.dword0(), 0x000E_0502);
        assert_eq!(AsynchronousEvent::DISCOVERY_CHANGED.dword0(), 0x0070_F002);
        assert_eq!(EventConfiguration::NAMESPACE_ATTRIBUTE.bits(), 0x100);
    }

    #[test]
    fn each_feature_has_its_dword() {
        let page = feature_effects([(FeatureId::ErrorRecovery, FeatureEffects::NAMESPACE_SCOPE)]);
        assert_eq!(page[20..24], [1, 0, 0x10, 0]);
        assert_eq!(page.iter().filter(|&&byte| byte != 0).count(), 2);
    }

    #[test]
    fn illegal_values_are_refused() {
        assert_eq!(NumberOfQueues::from_bits(0xFFFF), Err(Invalid::field("NSQR", 11, 0)));
        assert_eq!(NumberOfQueues::from_bits(0xFFFF_0000), Err(Invalid::field("NCQR", 11, 16)));
        assert_eq!(TemperatureThreshold::from_bits(2 << 20), Err(Invalid::field("THSEL", 11, 20)));
    }

    #[test]
    fn a_timestamp_has_48_bits() {
        let stamp = Timestamp::set_by_host(0x0123_4567_89AB_CDEF);
        assert_eq!(stamp.encode(), [0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 2, 0]);
        assert_eq!(stamp.ms(), 0x4567_89AB_CDEF);
        assert!(Timestamp::decode(&[0; 7]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn dwords_round_trip(dword: u32) {
                assert_eq!(LbaStatusInterval::from_bits(dword).bits(), dword);
            assert_eq!(AsynchronousEvent::from_dword0(dword).dword0(), dword & 0x00FF_FF07);
            if let Ok(queues) = NumberOfQueues::from_bits(dword) {
                assert_eq!(queues.bits(), dword);
            }
        }
    }
}
