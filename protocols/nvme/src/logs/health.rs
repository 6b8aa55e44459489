//! SMART / Health Information (Base, clause of the same name).

use crate::wire::{flags, layout};

flags! {
    /// What is in a critical state.
    pub struct CriticalWarning(u8) {
        /// Available spare is below its threshold.
        SPARE = 0,
        /// A temperature is outside its threshold.
        TEMPERATURE = 1,
        /// Media or internal errors have degraded reliability.
        RELIABILITY = 2,
        /// The media is read only.
        READ_ONLY = 3,
        /// Volatile memory backup has failed.
        BACKUP_FAILED = 4,
    }
}

layout! {
    /// SMART / Health Information.
    pub struct Health[512] {
        /// Critical warning.
        0 => critical_warning: CriticalWarning,
        /// Composite temperature in kelvins.
        1 => composite_temperature_kelvins: u16,
        /// Available spare in percent.
        3 => available_spare_percent: u8,
        /// Available spare threshold in percent.
        4 => spare_threshold_percent: u8,
        /// Percentage used, may exceed 100.
        5 => used_percent: u8,
        /// Endurance group critical warning summary.
        6 => endurance_warning: u8,
        /// Data units read: thousands of 512 bytes, rounded up.
        32 => data_units_read: u128,
        /// Data units written: thousands of 512 bytes, rounded up.
        48 => data_units_written: u128,
        /// Host read commands: Read, Compare and Verify among them.
        64 => host_reads: u128,
        /// Host write commands.
        80 => host_writes: u128,
        /// Controller busy time in minutes.
        96 => busy_minutes: u128,
        /// Power cycles.
        112 => power_cycles: u128,
        /// Power on hours.
        128 => power_on_hours: u128,
        /// Unexpected power losses.
        144 => unsafe_shutdowns: u128,
        /// Media and data integrity errors.
        160 => media_errors: u128,
        /// Number of error information log entries over the controller's life.
        176 => error_log_entries: u128,
        /// Warning composite temperature time in minutes.
        192 => warning_temperature_minutes: u32,
        /// Critical composite temperature time in minutes.
        196 => critical_temperature_minutes: u32,
        /// Temperature sensors in kelvins, 0 for none.
        200 => sensor_kelvins: [u16; 8],
    }
}

impl Health {
    /// Data units that this many bytes are.
    pub const fn data_units(bytes: u128) -> u128 {
        bytes.div_ceil(512_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_units_are_rounded_up() {
        assert_eq!([0, 1, 512_000, 512_001].map(Health::data_units), [0, 1, 1, 2]);
    }
}
