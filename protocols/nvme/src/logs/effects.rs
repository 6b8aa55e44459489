//! Commands Supported and Effects (Base, clause of the same name).

use crate::opcodes::{AdminOpcode, IoOpcode};
use crate::wire::{TooShort, flags};

flags! {
    /// What a command does besides its own work.
    pub struct CommandEffects(u32) {
        /// CSUPP: the command is supported.
        SUPPORTED = 0,
        /// LBCC: it may change the content of blocks.
        LOGICAL_BLOCK_CONTENT_CHANGE = 1,
        /// CSP: it acts on a namespace.
        NAMESPACE_SCOPE = 20,
        /// CSP: it acts on a controller.
        CONTROLLER_SCOPE = 21,
    }
}

/// The page: 256 dwords for admin commands, 256 for I/O commands, 2048 bytes reserved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EffectsLog {
    admin: [CommandEffects; 256],
    io: [CommandEffects; 256],
}

impl EffectsLog {
    /// Bytes of the page.
    pub const BYTES: usize = 4096;

    /// The page that supports nothing.
    pub const fn none() -> EffectsLog {
        EffectsLog { admin: [CommandEffects::NONE; 256], io: [CommandEffects::NONE; 256] }
    }

    /// The same page with this admin command supported.
    pub fn with_admin(mut self, opcode: AdminOpcode, effects: CommandEffects) -> EffectsLog {
        self.admin[usize::from(opcode.code())] = CommandEffects::SUPPORTED | effects;
        self
    }

    /// The same page with this I/O command supported; those that write say so by themselves. No scope is reported: each acts on its
    /// namespace, and Linux hosts warn of the bit that says so ("unusual effects").
    pub fn with_io(mut self, opcode: IoOpcode) -> EffectsLog {
        let effects = match opcode {
            IoOpcode::Write
            | IoOpcode::WriteUncorrectable
            | IoOpcode::WriteZeroes
            | IoOpcode::DatasetManagement
            | IoOpcode::Copy => CommandEffects::LOGICAL_BLOCK_CONTENT_CHANGE,
            _ => CommandEffects::NONE,
        };
        self.io[usize::from(opcode.code())] = CommandEffects::SUPPORTED | effects;
        self
    }

    /// What the page says of an admin opcode.
    pub const fn admin(&self, opcode: u8) -> CommandEffects {
        self.admin[opcode as usize]
    }

    /// What the page says of an I/O opcode.
    pub const fn io(&self, opcode: u8) -> CommandEffects {
        self.io[opcode as usize]
    }

    /// The page.
    pub fn encode(&self) -> [u8; EffectsLog::BYTES] {
        let mut page = [0; EffectsLog::BYTES];
        for (entry, effects) in page.chunks_exact_mut(4).zip(self.admin.iter().chain(&self.io)) {
            entry.copy_from_slice(&effects.bits().to_le_bytes());
        }
        page
    }

    /// The page that was read; 2048 bytes of it are enough.
    pub fn decode(page: &[u8]) -> Result<EffectsLog, TooShort> {
        if page.len() < 2048 {
            return Err(TooShort { structure: "EffectsLog", needed: 2048, got: page.len() });
        }
        let dword = |i: usize| u32::from_le_bytes([page[i * 4], page[i * 4 + 1], page[i * 4 + 2], page[i * 4 + 3]]);
        let effects = |i| CommandEffects::from_bits_retain(dword(i));
        Ok(EffectsLog { admin: std::array::from_fn(effects), io: std::array::from_fn(|i| effects(256 + i)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_opcode_has_its_dword() {
        let log = EffectsLog::none()
            .with_admin(AdminOpcode::Identify, CommandEffects::NONE)
            .with_io(IoOpcode::Write)
            .with_io(IoOpcode::Verify);
        let page = log.encode();
        assert_eq!((page[6 * 4], page[1024 + 4], page[1024 + 0x0C * 4]), (1, 3, 1));
        assert_eq!(page.iter().filter(|&&byte| byte != 0).count(), 3);
        assert_eq!(EffectsLog::decode(&page), Ok(log.clone()));
        assert!(log.io(0x0C).contains(CommandEffects::SUPPORTED) && log.admin(0x0C) == CommandEffects::NONE);
        assert!(EffectsLog::decode(&page[..2047]).is_err());
    }
}
