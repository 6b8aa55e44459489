//! Log pages: written by a target, read by a host (Base, "Get Log Page command"; NVM, "Log Page").
//!
//! A page is whole bytes here; which part of it a command gets is [`crate::admin::GetLogPage::slice`].

mod damage;
mod discovery;
mod effects;
mod error_information;
mod health;
mod lba_status;

pub use damage::{
    DamageEntry, DamageEntryFlags, DamageFlags, DamageHeader, DamageLog, DamageLogError, DamageRunEntry,
    RawDamageEntry, RawDamageRun,
};
pub use discovery::{AddressFamily, DiscoveryEntry, DiscoveryHeader, DiscoveryLog, SubsystemType, TransportType};
pub use effects::{CommandEffects, EffectsLog};
pub use error_information::{ErrorEntry, ErrorLog};
pub use health::{CriticalWarning, Health};
pub use lba_status::{LbaStatusElement, LbaStatusLog, LbaStatusRanges};

use crate::identify::parse_namespace_list;
use crate::wire::{Ascii, codes, layout};

codes! {
    /// Log page identifiers (Base and NVM, field LID).
    pub enum LogPage: u8 {
        /// Supported Log Pages.
        SupportedLogPages = 0x00,
        /// Error Information.
        ErrorInformation = 0x01,
        /// SMART / Health Information.
        Health = 0x02,
        /// Firmware Slot Information.
        FirmwareSlot = 0x03,
        /// Changed Attached Namespace List.
        ChangedNamespaces = 0x04,
        /// Commands Supported and Effects.
        CommandEffects = 0x05,
        /// Asymmetric Namespace Access.
        Ana = 0x0C,
        /// LBA Status Information.
        LbaStatus = 0x0E,
        /// Feature Identifiers Supported and Effects.
        FeatureEffects = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        ManagementEffects = 0x13,
        /// Discovery.
        Discovery = 0x70,
        /// Reservation Notification.
        ReservationNotification = 0x80,
        /// Damage: a page of sealblock, see [`DamageLog`].
        Damage = 0xC0,
        /// Extensions: a page of sealblock, see [`crate::extensions::ExtensionsLog`].
        Extensions = 0xC1,
    }
}

/// The page Supported Log Pages for these pages (Base, "Supported Log Pages"): a dword for each identifier, bit 0 says
/// supported.
pub fn supported_log_pages(pages: &[LogPage]) -> [u8; 1024] {
    let mut log = [0; 1024];
    for page in pages {
        log[usize::from(page.code()) * 4] = 1;
    }
    log
}

/// Whether a page Supported Log Pages lists `lid`; what is behind its end is not listed.
pub fn lists_log_page(log: &[u8], lid: u8) -> bool {
    log.get(usize::from(lid) * 4).is_some_and(|byte| byte & 1 != 0)
}

layout! {
    /// Firmware Slot Information (Base, "Firmware Slot Information").
    pub struct FirmwareSlots[512] {
        /// AFI: bits 2:0 the slot in use.
        0 => afi: u8,
        /// FRS1 to FRS7: revision in each slot, all zero for an empty one.
        8 => frs: [Ascii<8>; 7],
    }
}

/// The page Changed Attached Namespace List (Base, clause of the same name): ascending identifiers, or FFFFFFFFh alone
/// if there are more than 1024.
pub fn changed_namespaces(changed: &[u32]) -> [u8; 4096] {
    let mut page = [0; 4096];
    let named = if changed.len() > 1024 { &[u32::MAX] } else { changed };
    for (entry, nsid) in page.chunks_exact_mut(4).zip(named) {
        entry.copy_from_slice(&nsid.to_le_bytes());
    }
    page
}

/// The namespaces that a page Changed Attached Namespace List names; `None` if any may have changed.
pub fn parse_changed_namespaces(page: &[u8]) -> Option<Vec<u32>> {
    let ids: Vec<u32> = parse_namespace_list(page).collect();
    if ids.first() == Some(&u32::MAX) { None } else { Some(ids) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supported_pages_are_dwords_by_identifier() {
        let log = supported_log_pages(&[LogPage::ErrorInformation, LogPage::Discovery]);
        assert_eq!(log.iter().filter(|&&byte| byte != 0).count(), 2);
        assert_eq!((log[4], log[0x70 * 4]), (1, 1));
        assert!(lists_log_page(&log, 1) && !lists_log_page(&log, 2) && !lists_log_page(&log[..4], 1));
    }

    #[test]
    fn too_many_changes_are_all() {
        assert_eq!(parse_changed_namespaces(&changed_namespaces(&[3, 7])), Some(vec![3, 7]));
        assert_eq!(parse_changed_namespaces(&changed_namespaces(&[1; 1025])), None);
        assert_eq!(parse_changed_namespaces(&[1, 0]), Some(vec![]));
    }

    /// Offsets and sizes in bytes as the tables of the base specification have them, compared with those that a C
    /// compiler gives the structures of libnvme.
    #[test]
    fn fields_stand_where_the_tables_draw_them() {
        let places = |fields: &[crate::wire::FieldAt]| -> Vec<_> {
            fields.iter().map(|field| (field.offset_bytes, field.size_bytes)).collect()
        };
        let error = [(0, 8), (8, 2), (10, 2), (12, 2), (14, 2), (16, 8), (24, 4), (28, 1), (29, 1), (30, 1), (31, 1)];
        assert_eq!(places(ErrorEntry::FIELDS), [error.as_slice(), &[(32, 8), (40, 2), (63, 1)]].concat());
        let counters = (32..192).step_by(16).map(|offset| (offset, 16));
        let health = [(0, 1), (1, 2), (3, 1), (4, 1), (5, 1), (6, 1)].into_iter().chain(counters);
        let health: Vec<_> = health.chain([(192, 4), (196, 4), (200, 16)]).collect();
        assert_eq!(places(Health::FIELDS), health);
        let entry = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (8, 2), (10, 2)];
        let texts = [(32, 32), (256, 256), (512, 256), (768, 1)];
        assert_eq!(places(DiscoveryEntry::FIELDS), [entry.as_slice(), &texts].concat());
        let pages = [ErrorEntry::BYTES, Health::BYTES, DiscoveryEntry::BYTES, FirmwareSlots::BYTES];
        assert_eq!(pages, [64, 512, 1024, 512]);
    }

    proptest::proptest! {
        #[test]
        fn any_page_is_read_or_refused(page in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..3000)) {
            let _ = (LbaStatusLog::decode(&page), DiscoveryLog::decode(&page));
            let _ = (EffectsLog::decode(&page), Health::decode(&page), ErrorLog::decode(&page).count());
            let _ = (parse_changed_namespaces(&page), FirmwareSlots::decode(&page), lists_log_page(&page, 255));
        }

        #[test]
        fn a_head_that_announces_too_much_is_refused(count in 2_u32.., body in 0..600_usize) {
            let mut page = vec![0_u8; 16 + body];
            page[4..8].copy_from_slice(&count.to_le_bytes());
            // Elements of zeroes name no known action, so either their length or their action is refused.
            proptest::prop_assert!(LbaStatusLog::decode(&page).is_err());
        }
    }

    #[test]
    fn a_firmware_revision_stands_at_byte_8() {
        let mut slots = FirmwareSlots { afi: 1, ..FirmwareSlots::default() };
        slots.frs[0] = Ascii::new("0.1.0");
        assert_eq!(slots.encode()[8..16], *b"0.1.0   ");
    }
}
