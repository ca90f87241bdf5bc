package replay

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

const (
	bufferSize = 64 << 10

	// maxBetween bounds what is read of a file for one frame, in bytes: the frame, and what pcapng
	// says beside it (names, interfaces), which the reader keeps in memory. The largest frame that
	// any tool writes is 256 KiB.
	maxBetween = 16 << 20
	// maxKept bounds the interfaces, and the names, that a section of a pcapng file may define.
	maxKept = 1 << 16
)

// capture gives the frames of a file.
type capture struct {
	count *counter
	buf   *bufio.Reader
	read  func() ([]byte, gopacket.CaptureInfo, error)
	link  func(gopacket.CaptureInfo) layers.LinkType
	kept  func() int // what the reader holds on to
}

// frame is one packet of a file. data is good until the next call of capture.next.
type frame struct {
	link layers.LinkType
	at   time.Time // zero where the file does not say
	data []byte
}

// next returns a frame. io.EOF ends a file that is whole.
func (c *capture) next() (frame, error) {
	c.count.limit = c.count.n + maxBetween
	data, ci, err := c.read()
	switch {
	case err == nil && c.kept() > maxKept:
		return frame{}, fmt.Errorf("the file defines more than %d interfaces or names: it is no capture of packets", maxKept)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return frame{}, errors.New("the file ends in the middle of this frame; it was cut short when it was written or copied")
	case err != nil:
		return frame{}, err
	}
	return frame{c.link(ci), ci.Timestamp, data}, nil
}

// offset is how many bytes of the file, unpacked, have been used up.
func (c *capture) offset() int64 { return c.count.n - int64(c.buf.Buffered()) }

// counter counts what is read, and stops at a limit that its user moves on.
type counter struct {
	r        io.Reader
	n, limit int64
}

func (c *counter) Read(p []byte) (int, error) {
	if c.n >= c.limit {
		return 0, fmt.Errorf("no end of it in %d MiB: this is damaged, or no packet", maxBetween>>20)
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.limit-c.n)])
	c.n += int64(n)
	return n, err
}

const pcapngMagic = 0x0a0d0d0a // type of a section header block, the same in both byte orders

// open reads the head of a capture file and finds out its format.
func open(r io.Reader) (*capture, error) {
	packed := bufio.NewReaderSize(r, bufferSize)
	count := &counter{r: packed, limit: maxBetween}
	if magic, _ := packed.Peek(2); len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(packed)
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", err)
		}
		count.r = z
	}
	// The readers of pcapgo take a bufio.Reader of this size as it is, so that offset can look into it.
	br := bufio.NewReaderSize(count, bufferSize)
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
		return &capture{
			count: count, buf: br, read: ng.ZeroCopyReadPacketData,
			link: func(ci gopacket.CaptureInfo) layers.LinkType {
				link, _ := ci.AncillaryData[0].(layers.LinkType)
				return link
			},
			kept: func() int { return max(ng.NInterfaces(), ng.NNames()) },
		}, nil
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
	return &capture{
		count: count, buf: br, read: p.ZeroCopyReadPacketData,
		link: func(gopacket.CaptureInfo) layers.LinkType { return p.LinkType() },
		kept: func() int { return 0 },
	}, nil
}
