package replay

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/reassembly"

	"aether/sniff"
)

// The oracle of this file is gopacket's reassembly: other people's idea of what a
// receiver makes of segments.

// theirs collects what gopacket hands on of the streams of a capture.
type theirs struct{ streams []*stream }

// stream is a connection as gopacket sees it: the bytes of the client and the server
// up to the first that are missing.
type stream struct {
	client, server netip.AddrPort
	bytes          [2][]byte
	holed          [2]bool
}

func (c *theirs) New(netFlow, tcpFlow gopacket.Flow, _ *layers.TCP, _ reassembly.AssemblerContext) reassembly.Stream {
	end := func(ip, port gopacket.Endpoint) netip.AddrPort {
		a, _ := netip.AddrFromSlice(ip.Raw())
		return netip.AddrPortFrom(a.Unmap(), uint16(port.Raw()[0])<<8|uint16(port.Raw()[1]))
	}
	s := &stream{client: end(netFlow.Src(), tcpFlow.Src()), server: end(netFlow.Dst(), tcpFlow.Dst())}
	c.streams = append(c.streams, s)
	return s
}

func (s *stream) Accept(*layers.TCP, gopacket.CaptureInfo, reassembly.TCPFlowDirection, reassembly.Sequence, *bool, reassembly.AssemblerContext) bool {
	return true
}

func (s *stream) ReassembledSG(sg reassembly.ScatterGather, _ reassembly.AssemblerContext) {
	dir, _, _, skip := sg.Info()
	i := 0
	if dir == reassembly.TCPDirServerToClient {
		i = 1
	}
	if skip != 0 {
		s.holed[i] = true
	}
	if n, _ := sg.Lengths(); !s.holed[i] {
		s.bytes[i] = append(s.bytes[i], sg.Fetch(n)...)
	}
}

func (s *stream) ReassemblyComplete(reassembly.AssemblerContext) bool { return false }

// reassemble gives the streams of raw IP frames.
func reassemble(frames [][]byte) []*stream {
	var c theirs
	a := reassembly.NewAssembler(reassembly.NewStreamPool(&c))
	for i, f := range frames {
		first := layers.LayerTypeIPv4
		if f[0]>>4 == 6 {
			first = layers.LayerTypeIPv6
		}
		p := gopacket.NewPacket(f, first, gopacket.Default)
		tcp, ok := p.TransportLayer().(*layers.TCP)
		if !ok {
			continue
		}
		p.Metadata().Timestamp = time.Unix(int64(i), 0)
		a.AssembleWithContext(p.NetworkLayer().NetworkFlow(), tcp, assembling(p.Metadata().CaptureInfo))
	}
	a.FlushAll()
	return c.streams
}

type assembling gopacket.CaptureInfo

func (a assembling) GetCaptureInfo() gopacket.CaptureInfo { return gopacket.CaptureInfo(a) }

// TestReassembly: whatever is lost, repeated, cut differently and reordered after the
// handshake, the client's bytes up to the first hole are those that gopacket hands on.
func TestReassembly(t *testing.T) {
	whole, holed := 0, 0
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 11))
		stream := []string{get + strings.Repeat("b", 700), "SSH-2.0-x\r\n" + strings.Repeat("c", 300),
			"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("d", 199), "PUT /" + strings.Repeat("e", 9000) + " HTTP/1.0\r\n\r\n"}[r.IntN(4)]
		frames := shake()
		var segs [][]byte
		for at := 0; at < len(stream); {
			n := min(1+r.IntN(1+len(stream)/6), len(stream)-at)
			if r.IntN(12) > 0 { // else lost
				segs = append(segs, up(hasACK, at, 0, stream[at:at+n]))
			}
			if r.IntN(4) == 0 { // again, cut differently
				from := r.IntN(at + 1)
				segs = append(segs, up(hasACK, from, 0, stream[from:at+n]))
			}
			at += n
		}
		r.Shuffle(len(segs), func(i, j int) { segs[i], segs[j] = segs[j], segs[i] })
		frames = append(frames, segs...)

		all := reassemble(frames)
		if len(all) != 1 {
			t.Fatalf("seed %d: gopacket sees %d streams", seed, len(all))
		}
		want := all[0].bytes[0]
		tab := newTable(false)
		for i, f := range frames {
			s, _ := new(decoder).decode(layers.LinkTypeRaw, f)
			tab.add(i+1, time.Time{}, s)
		}
		c := tab.rest()[0]
		f := c.flow()
		state := new(sniff.State)
		answer := state.Detect(want)
		switch {
		case !answer.More:
			whole++
			if f.Proto != answer.Proto || f.Incomplete {
				t.Errorf("seed %d: %+v, gopacket's %d bytes are %s", seed, f, len(want), answer.Proto)
			}
		default: // no answer: all that is there can be compared
			holed++
			if got := c.half[c.client].prefix(); !bytes.Equal(got, want) {
				t.Errorf("seed %d: %d bytes up to the hole; gopacket hands on %d", seed, len(got), len(want))
			}
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Logf("%d streams with an answer, %d with a hole before it", whole, holed)
	if whole == 0 || holed == 0 {
		t.Error("one of the two was never tried")
	}
}

// TestReassemblyOfCaptures: for each connection of the captures whose handshake is in the file,
// the class that gopacket's streams give is ours. It says nothing of those whose SYN is missing: for
// it they have no first byte. They and one forged handshake are why streams are put together here.
func TestReassemblyOfCaptures(t *testing.T) {
	dir := cmp.Or(os.Getenv("AETHER_PCAP_DIR"), "testdata")
	agree, alone := 0, 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(d.Name(), ".pcap") {
			return err
		}
		streams := reassembleFile(t, path)
		for _, f := range flowsOf(t, path) {
			if f.Transport != TCP || f.Midstream || f.Incomplete || f.ClientBytes+f.ServerBytes == 0 {
				continue
			}
			same, seen := false, false
			for _, s := range streams {
				i := 0
				switch {
				case s.client == f.Client && s.server == f.Server:
				case s.client == f.Server && s.server == f.Client:
					i = 1 // the SYN-ACK was captured first
				default:
					continue
				}
				r := new(sniff.State).Last(s.bytes[i])
				seen = seen || len(s.bytes[i]) > 0
				same = same || r.Proto == f.Proto && string(r.SNI) == f.SNI
			}
			switch {
			case same:
				agree++
			case !seen:
				alone++
			default:
				t.Errorf("%s:%d: %s here, and gopacket's bytes say otherwise", path, f.Frame, f.Proto)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d connections of which both have the same, %d of whose client gopacket has nothing", agree, alone)
	if agree < 20*alone {
		t.Error("gopacket sees too few connections to be an oracle")
	}
}

func reassembleFile(t *testing.T, path string) []*stream {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := open(f)
	if err != nil {
		t.Fatal(err)
	}
	var all theirs
	a := reassembly.NewAssembler(reassembly.NewStreamPool(&all))
	for {
		f, err := c.next()
		if err != nil {
			break
		}
		if f.link == linkNFLOG {
			continue // gopacket does not decode it
		}
		p := gopacket.NewPacket(f.data, gopacket.Decoder(f.link), gopacket.Default)
		if tcp, ok := p.TransportLayer().(*layers.TCP); ok && p.NetworkLayer() != nil {
			a.AssembleWithContext(p.NetworkLayer().NetworkFlow(), tcp, assembling{Timestamp: f.at})
		}
	}
	a.FlushAll()
	return all.streams
}
