package replay

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// capture gives the frames of a file.
type capture struct {
	read func() ([]byte, gopacket.CaptureInfo, error)
	link func(gopacket.CaptureInfo) layers.LinkType
}

// next returns a frame, good until the next call, and its link type. io.EOF
// ends a file that is whole.
func (c *capture) next() (layers.LinkType, []byte, error) {
	data, ci, err := c.read()
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the file ends in the middle of this frame; it was cut short when it was written or copied")
		}
		return 0, nil, err
	}
	return c.link(ci), data, nil
}

const pcapngMagic = 0x0a0d0d0a // type of a section header block, the same in both byte orders

// open reads the head of a capture file and finds out its format.
func open(r io.Reader) (*capture, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	if magic, _ := br.Peek(2); len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", err)
		}
		br = bufio.NewReaderSize(z, 64<<10)
	}
	magic, err := br.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if len(magic) < 4 {
		return nil, errors.New("not a capture: the file has fewer than 4 bytes")
	}
	if binary.BigEndian.Uint32(magic) == pcapngMagic {
		ng, err := pcapgo.NewNgReader(br, pcapgo.NgReaderOptions{WantMixedLinkType: true})
		if err != nil {
			return nil, fmt.Errorf("pcapng: %w", err)
		}
		return &capture{ng.ZeroCopyReadPacketData, func(ci gopacket.CaptureInfo) layers.LinkType {
			link, _ := ci.AncillaryData[0].(layers.LinkType)
			return link
		}}, nil
	}
	switch binary.LittleEndian.Uint32(magic) {
	case 0xa1b2c3d4, 0xd4c3b2a1, 0xa1b23c4d, 0x4d3cb2a1:
	default:
		return nil, fmt.Errorf("not a capture: it starts with % x, which is neither pcap nor pcapng", magic)
	}
	p, err := pcapgo.NewReader(br)
	if err != nil {
		return nil, fmt.Errorf("pcap: %w", err)
	}
	return &capture{p.ZeroCopyReadPacketData, func(gopacket.CaptureInfo) layers.LinkType { return p.LinkType() }}, nil
}
