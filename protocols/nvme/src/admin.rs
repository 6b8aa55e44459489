//! Admin commands that read structures or control the controller: Identify, Get Log Page, Get and Set Features, Abort,
//! Asynchronous Event Request, Keep Alive. Get LBA Status is in [`crate::nvm`].

use zerocopy::little_endian::U32;

use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::AdminOpcode;
use crate::wire::{bit, bits, codes};

codes! {
    /// Which structure Identify returns (Base, Identify, field CNS).
    pub enum Cns: u8 {
        /// Identify Namespace of the NVM command set: [`crate::identify::Namespace`].
        Namespace = 0x00,
        /// Identify Controller: [`crate::identify::Controller`].
        Controller = 0x01,
        /// Active Namespace ID list.
        ActiveNamespaces = 0x02,
        /// Namespace Identification Descriptor list.
        NamespaceDescriptors = 0x03,
        /// Identify Namespace specific to a command set: [`crate::identify::NvmNamespace`].
        CommandSetNamespace = 0x05,
        /// Identify Controller specific to a command set: [`crate::identify::NvmController`].
        CommandSetController = 0x06,
        /// Active Namespace ID list of one command set.
        CommandSetActiveNamespaces = 0x07,
        /// Identify Namespace independent of the command set: [`crate::identify::IndependentNamespace`].
        IndependentNamespace = 0x08,
        /// Allocated Namespace ID list.
        AllocatedNamespaces = 0x10,
        /// Identify Namespace of an allocated namespace.
        AllocatedNamespace = 0x11,
        /// Controller list of a namespace.
        NamespaceControllers = 0x12,
        /// Controller list of the subsystem.
        Controllers = 0x13,
        /// I/O command sets.
        CommandSets = 0x1C,
    }
}

/// Identify (Base, "Identify command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identify {
    /// CNS: which structure.
    pub cns: Cns,
    /// NSID: which namespace; for lists, the one after which they start.
    pub nsid: u32,
    /// CNTID: which controller, for controller lists.
    pub cntid: u16,
    /// CSI: which command set; 0 is NVM.
    pub csi: u8,
}

/// Get Log Page (Base, "Get Log Page command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetLogPage {
    /// LID: which page, see [`crate::logs::LogPage`].
    pub lid: u8,
    /// NSID: whose page.
    pub nsid: u32,
    /// LSP: seven bits whose meaning depends on the page.
    pub lsp: u8,
    /// RAE: the event that made the host read is not cleared.
    pub retain_event: bool,
    /// NUMD: requested bytes, a multiple of 4 and at least 4.
    pub length_bytes: u64,
    /// LPO: first requested byte (or index, with `offset_is_index`).
    pub offset: u64,
    /// OT: the offset counts entries instead of bytes.
    pub offset_is_index: bool,
    /// LSI: 16 bits whose meaning depends on the page.
    pub lsi: u16,
    /// CSI: which command set.
    pub csi: u8,
}

codes! {
    /// Which value Get Features returns (Base, Get Features, field SEL).
    pub enum FeatureSelect: u8 {
        /// The current value.
        Current = 0,
        /// The default value.
        Default = 1,
        /// The saved value.
        Saved = 2,
        /// What can be done with the feature.
        Capabilities = 3,
    }
}

/// Get Features (Base, "Get Features command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetFeatures {
    /// FID: which feature, see [`crate::features::FeatureId`].
    pub fid: u8,
    /// SEL: which of its values.
    pub select: FeatureSelect,
    /// NSID: for which namespace.
    pub nsid: u32,
    /// Dword 11, whose meaning depends on the feature.
    pub cdw11: u32,
}

/// Set Features (Base, "Set Features command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetFeatures {
    /// FID: which feature, see [`crate::features::FeatureId`].
    pub fid: u8,
    /// SV: the value outlives resets and power loss.
    pub save: bool,
    /// NSID: for which namespace.
    pub nsid: u32,
    /// Dword 11: the value, for features that fit there.
    pub cdw11: u32,
}

/// Abort (Base, "Abort command"). Bit 0 of the answer's dword 0 is 0 if the command was aborted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// SQID: queue of the command.
    pub queue: u16,
    /// CID: the command.
    pub cid: u16,
}

/// An admin command, decoded as far as its 64 bytes tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdminCommand {
    /// Identify.
    Identify(Identify),
    /// Get Log Page.
    GetLogPage(GetLogPage),
    /// Get Features.
    GetFeatures(GetFeatures),
    /// Set Features.
    SetFeatures(SetFeatures),
    /// Abort.
    Abort(Abort),
    /// Asynchronous Event Request: answered when something happens, with an [`crate::features::AsynchronousEvent`].
    AsynchronousEventRequest,
    /// Keep Alive.
    KeepAlive,
    /// Get LBA Status.
    GetLbaStatus(crate::nvm::GetLbaStatus),
}

impl AdminCommand {
    /// The command, or why it is none. Fabrics commands are not looked at here.
    pub fn decode(command: &Command) -> Result<AdminCommand, Invalid> {
        let (nsid, cdw10, cdw11) = (command.nsid.get(), command.cdw10.get(), command.cdw11.get());
        let (fid, low, high) = (cdw10 as u8, cdw10 as u16, (cdw10 >> 16) as u16);
        match AdminOpcode::from_code(command.opcode) {
            Some(AdminOpcode::Identify) => Identify::decode(command).map(AdminCommand::Identify),
            Some(AdminOpcode::GetLogPage) => Ok(AdminCommand::GetLogPage(GetLogPage::decode(command))),
            Some(AdminOpcode::GetFeatures) => {
                let select = FeatureSelect::from_code(bits(cdw10, 8, 3) as u8);
                let select = select.ok_or(Invalid::field("SEL", 10, 8))?;
                Ok(AdminCommand::GetFeatures(GetFeatures { fid, select, nsid, cdw11 }))
            }
            Some(AdminOpcode::SetFeatures) => {
                Ok(AdminCommand::SetFeatures(SetFeatures { fid, save: bit(cdw10, 31), nsid, cdw11 }))
            }
            Some(AdminOpcode::Abort) => Ok(AdminCommand::Abort(Abort { queue: low, cid: high })),
            Some(AdminOpcode::AsynchronousEventRequest) => Ok(AdminCommand::AsynchronousEventRequest),
            Some(AdminOpcode::KeepAlive) => Ok(AdminCommand::KeepAlive),
            Some(AdminOpcode::GetLbaStatus) => {
                crate::nvm::GetLbaStatus::decode(command).map(AdminCommand::GetLbaStatus)
            }
            _ => Err(Invalid::Opcode(command.opcode)),
        }
    }
}

impl Identify {
    /// Bytes of every structure that Identify returns.
    pub const DATA_BYTES: usize = 4096;

    fn decode(command: &Command) -> Result<Identify, Invalid> {
        let cdw10 = command.cdw10.get();
        Ok(Identify {
            cns: Cns::from_code(cdw10 as u8).ok_or(Invalid::field("CNS", 10, 0))?,
            nsid: command.nsid.get(),
            cntid: (cdw10 >> 16) as u16,
            csi: (command.cdw11.get() >> 24) as u8,
        })
    }

    /// The submission queue entry.
    pub fn encode(&self) -> Command {
        let mut command = Command::new(AdminOpcode::Identify.code(), self.nsid);
        command.cdw10 = U32::new(u32::from(self.cns.code()) | u32::from(self.cntid) << 16);
        command.cdw11 = U32::new(u32::from(self.csi) << 24);
        command
    }
}

impl GetLogPage {
    /// The page from its start, for all namespaces, with the event cleared.
    pub const fn new(lid: u8, length_bytes: u64) -> GetLogPage {
        GetLogPage {
            lid,
            nsid: crate::NSID_ALL,
            lsp: 0,
            retain_event: false,
            length_bytes,
            offset: 0,
            offset_is_index: false,
            lsi: 0,
            csi: 0,
        }
    }

    fn decode(command: &Command) -> GetLogPage {
        let (cdw10, cdw11, cdw14) = (command.cdw10.get(), command.cdw11.get(), command.cdw14.get());
        let dwords = u64::from(cdw10 >> 16) | u64::from(cdw11 & 0xFFFF) << 16;
        GetLogPage {
            lid: cdw10 as u8,
            nsid: command.nsid.get(),
            lsp: bits(cdw10, 8, 7) as u8,
            retain_event: bit(cdw10, 15),
            length_bytes: (dwords + 1) * 4,
            offset: u64::from(command.cdw12.get()) | u64::from(command.cdw13.get()) << 32,
            offset_is_index: bit(cdw14, 23),
            lsi: (cdw11 >> 16) as u16,
            csi: (cdw14 >> 24) as u8,
        }
    }

    /// The submission queue entry. The length is brought to the nearest legal value below.
    pub fn encode(&self) -> Command {
        let mut command = Command::new(AdminOpcode::GetLogPage.code(), self.nsid);
        let dwords = (self.length_bytes / 4).clamp(1, 1 << 32) - 1;
        let (lid, lsp) = (u32::from(self.lid), u32::from(self.lsp & 0x7F));
        command.cdw10 = U32::new(lid | lsp << 8 | u32::from(self.retain_event) << 15 | (dwords as u32) << 16);
        command.cdw11 = U32::new((dwords >> 16) as u32 & 0xFFFF | u32::from(self.lsi) << 16);
        command.cdw12 = U32::new(self.offset as u32);
        command.cdw13 = U32::new((self.offset >> 32) as u32);
        command.cdw14 = U32::new(u32::from(self.offset_is_index) << 23 | u32::from(self.csi) << 24);
        command
    }

    /// The requested part of a page, cut where the page ends; the rest of the transfer is zero. Refused if
    /// it starts behind the page's end or, as only paged logs have them, if it counts in entries or lies odd.
    pub fn slice<'a>(&self, page: &'a [u8]) -> Result<&'a [u8], Invalid> {
        if self.offset_is_index {
            return Err(Invalid::field("OT", 14, 23));
        }
        let start = usize::try_from(self.offset).ok().filter(|start| start % 4 == 0 && *start <= page.len());
        let rest = &page[start.ok_or(Invalid::field("LPOL", 12, 0))?..];
        Ok(&rest[..usize::try_from(self.length_bytes).unwrap_or(usize::MAX).min(rest.len())])
    }
}

impl GetFeatures {
    /// The submission queue entry.
    pub fn encode(&self) -> Command {
        let mut command = Command::new(AdminOpcode::GetFeatures.code(), self.nsid);
        command.cdw10 = U32::new(u32::from(self.fid) | u32::from(self.select.code()) << 8);
        command.cdw11 = U32::new(self.cdw11);
        command
    }
}

impl SetFeatures {
    /// The submission queue entry.
    pub fn encode(&self) -> Command {
        let mut command = Command::new(AdminOpcode::SetFeatures.code(), self.nsid);
        command.cdw10 = U32::new(u32::from(self.fid) | u32::from(self.save) << 31);
        command.cdw11 = U32::new(self.cdw11);
        command
    }
}

impl Abort {
    /// The submission queue entry.
    pub fn encode(&self) -> Command {
        let mut command = Command::new(AdminOpcode::Abort.code(), 0);
        command.cdw10 = U32::new(u32::from(self.queue) | u32::from(self.cid) << 16);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_discovery_log_as_linux_reads_it() {
        let page = GetLogPage { nsid: 0, retain_event: true, ..GetLogPage::new(0x70, 1024) };
        let command = page.encode();
        assert_eq!((command.cdw10.get(), command.cdw11.get()), (0x00FF_8070, 0));
        assert_eq!(AdminCommand::decode(&command), Ok(AdminCommand::GetLogPage(page)));
    }

    #[test]
    fn a_log_is_cut_at_its_end_and_refused_behind_it() {
        let page = [1_u8; 100];
        let ask = |offset, length_bytes| GetLogPage { offset, ..GetLogPage::new(1, length_bytes) };
        assert_eq!(ask(0, 4096).slice(&page).unwrap().len(), 100);
        assert_eq!(ask(96, 4096).slice(&page).unwrap().len(), 4);
        assert_eq!(ask(100, 4).slice(&page).unwrap().len(), 0);
        for (offset, field) in [(104, "LPOL"), (2, "LPOL"), (u64::MAX, "LPOL")] {
            assert!(matches!(ask(offset, 4).slice(&page), Err(Invalid::Field { field: f, .. }) if f == field));
        }
        let indexed = GetLogPage { offset_is_index: true, ..ask(0, 4) };
        assert_eq!(indexed.slice(&page), Err(Invalid::field("OT", 14, 23)));
    }

    #[test]
    fn unknown_structures_selections_and_opcodes_are_refused() {
        let mut identify = Identify { cns: Cns::Controller, nsid: 0, cntid: 0, csi: 0 }.encode();
        assert!(AdminCommand::decode(&identify).is_ok());
        identify.cdw10 = U32::new(0xFF);
        assert_eq!(AdminCommand::decode(&identify), Err(Invalid::field("CNS", 10, 0)));
        let mut get = GetFeatures { fid: 7, select: FeatureSelect::Current, nsid: 0, cdw11: 0 }.encode();
        get.cdw10 = U32::new(7 | 4 << 8);
        assert_eq!(AdminCommand::decode(&get), Err(Invalid::field("SEL", 10, 8)));
        assert_eq!(AdminCommand::decode(&Command::new(0x00, 0)), Err(Invalid::Opcode(0)));
    }

    proptest! {
        #[test]
        fn commands_round_trip(
            (nsid, cntid, csi, fid) in any::<(u32, u16, u8, u8)>(),
            (cdw11, save, lsp, length) in (any::<u32>(), any::<bool>(), 0..128_u8, 1..=1_u64 << 32),
            offset: u64,
        ) {
            let page = GetLogPage {
                nsid, lsp, retain_event: save, offset, offset_is_index: !save, lsi: cntid, csi,
                ..GetLogPage::new(fid, length * 4)
            };
            prop_assert_eq!(AdminCommand::decode(&page.encode()), Ok(AdminCommand::GetLogPage(page)));
            let identify = Identify { cns: Cns::CommandSetNamespace, nsid, cntid, csi };
            prop_assert_eq!(AdminCommand::decode(&identify.encode()), Ok(AdminCommand::Identify(identify)));
            let set = SetFeatures { fid, save, nsid, cdw11 };
            prop_assert_eq!(AdminCommand::decode(&set.encode()), Ok(AdminCommand::SetFeatures(set)));
            let get = GetFeatures { fid, select: FeatureSelect::Saved, nsid, cdw11 };
            prop_assert_eq!(AdminCommand::decode(&get.encode()), Ok(AdminCommand::GetFeatures(get)));
            let abort = Abort { queue: cntid, cid: fid.into() };
            prop_assert_eq!(AdminCommand::decode(&abort.encode()), Ok(AdminCommand::Abort(abort)));
        }
    }
}
