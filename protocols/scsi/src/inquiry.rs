//! The standard INQUIRY data (SPC-5, "Standard INQUIRY data").

use crate::wire::{TooShort, bit, flag, head};

/// The fields of the standard INQUIRY data that mean something here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inquiry {
    /// PERIPHERAL QUALIFIER: 0 for a logical unit that is there.
    pub qualifier: u8,
    /// PERIPHERAL DEVICE TYPE.
    pub device_type: u8,
    /// VERSION: 7 for SPC-5.
    pub version: u8,
    /// PROTECT: the logical unit can have protection information.
    pub protect: bool,
    /// T10 VENDOR IDENTIFICATION.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION.
    pub product: String,
    /// PRODUCT REVISION LEVEL.
    pub revision: String,
}

impl Inquiry {
    /// Bytes of the data.
    pub const BYTES: usize = 36;
    /// PERIPHERAL DEVICE TYPE of a direct access block device.
    pub const DISK: u8 = 0x00;
    /// PERIPHERAL DEVICE TYPE of a host managed zoned block device.
    pub const ZONED: u8 = 0x14;

    /// Reads the data. Texts have no characters that are not printable.
    ///
    /// # Errors
    /// Fewer bytes than these fields take.
    pub fn decode(bytes: &[u8]) -> Result<Inquiry, TooShort> {
        let bytes = head::<{ Inquiry::BYTES }>("standard INQUIRY data", bytes)?;
        Ok(Inquiry {
            qualifier: bytes[0] >> 5,
            device_type: bytes[0] & 0x1F,
            version: bytes[2],
            protect: bit(bytes[5], 0),
            vendor: text(&bytes[8..16]),
            product: text(&bytes[16..32]),
            revision: text(&bytes[32..36]),
        })
    }

    /// Writes the data. Texts are cut to their fields.
    pub fn encode(&self) -> [u8; Inquiry::BYTES] {
        let mut bytes = [0; Inquiry::BYTES];
        bytes[0] = self.qualifier << 5 | self.device_type & 0x1F;
        bytes[2] = self.version;
        // RESPONSE DATA FORMAT, and ADDITIONAL LENGTH behind itself.
        (bytes[3], bytes[4]) = (2, Inquiry::BYTES as u8 - 5);
        bytes[5] = flag(self.protect, 0);
        // CMDQUE.
        bytes[7] = 2;
        put_text(&mut bytes[8..16], &self.vendor);
        put_text(&mut bytes[16..32], &self.product);
        put_text(&mut bytes[32..36], &self.revision);
        bytes
    }
}

/// The text of a field without its padding; what is not printable ASCII reads as a question mark.
pub fn text(field: &[u8]) -> String {
    let is_padding = |byte: &u8| matches!(byte, b' ' | 0);
    let end = field.iter().rposition(|byte| !is_padding(byte)).map_or(0, |last| last + 1);
    let from = field[..end].iter().position(|byte| !is_padding(byte)).unwrap_or(0);
    let printable = |&byte: &u8| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '?' };
    field[from..end].iter().map(printable).collect()
}

fn put_text(field: &mut [u8], value: &str) {
    field.fill(b' ');
    for (to, from) in field.iter_mut().zip(value.chars()) {
        *to = if from.is_ascii_graphic() || from == ' ' { from as u8 } else { b'?' };
    }
}
