package registry

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
)

var cart = model.ServiceName{Namespace: "shop", Name: "cart"}

func goodRow() *registrypb.ServiceEndpoint {
	return &registrypb.ServiceEndpoint{
		Ip: "10.1.0.7", ClusterName: "east", Port: 8080, Ports: []uint32{8080, 9000},
		PortProtocols:      map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 9000: registrypb.PortProtocol_PORT_PROTOCOL_TCP},
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: "shop", NodeName: "node-a"},
	}
}

func ports(e *registrypb.ServiceEndpoint, n int, first uint32) {
	e.Ports, e.PortProtocols = nil, map[uint32]registrypb.PortProtocol{}
	for i := range n {
		e.Ports = append(e.Ports, first+uint32(i))
		e.PortProtocols[first+uint32(i)] = registrypb.PortProtocol_PORT_PROTOCOL_TCP
	}
}

// TestBelief: a row is believed only as far as its writer may speak. Of every field of a row
// the table has what is refused of it, or why there is nothing to refuse; a field that is new
// fails until it is there.
func TestBelief(t *testing.T) {
	type bad map[string]func(*registrypb.ServiceEndpoint)
	of := func(what func(*registrypb.ServiceEndpoint, string), values ...string) bad {
		out := bad{}
		for _, v := range values {
			out[v] = func(e *registrypb.ServiceEndpoint) { what(e, v) }
		}
		return out
	}
	fields := map[protoreflect.FullName]struct {
		want Fault
		bad  bad
		free string
	}{
		"ip": {want: BadAddress, bad: of(func(e *registrypb.ServiceEndpoint, v string) { e.Ip = v },
			"", "cart", "10.0.0.1:80", "0.0.0.0", "::", "0.0.0.7", "255.255.255.255", "127.0.0.1", "127.255.255.254", "::1", "::127.0.0.1", "::10.0.0.1", "169.254.169.254", "fe80::1", "fe80::1%eth0",
			"febf::1", "224.0.0.1", "239.255.255.250", "ff02::1", "ff01::1", "ff05::2", "fd00::1%eth0",
			"::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "::ffff:224.0.0.1", "0:0:0:0:0:ffff:7f00:0001")},
		"cluster_name": {want: NoCluster, bad: of(func(e *registrypb.ServiceEndpoint, v string) { e.ClusterName = v }, "")},
		"port":         {want: BadPort, bad: bad{"65536": func(e *registrypb.ServiceEndpoint) { e.Port = 65536 }}},
		"ports": {want: BadPort, bad: bad{"65536": func(e *registrypb.ServiceEndpoint) {
			e.Ports = append(e.Ports, 65536)
			e.PortProtocols[65536] = registrypb.PortProtocol_PORT_PROTOCOL_TCP
		}}},
		"port_protocols": {want: Undeclared, bad: bad{"one more": func(e *registrypb.ServiceEndpoint) { e.PortProtocols[81] = 1 }}},
		"udp_ports":      {want: Undeclared, bad: bad{"one more": func(e *registrypb.ServiceEndpoint) { e.UdpPorts = []uint32{53} }}},
		"spiffe_id": {want: ForeignIdentity, bad: of(func(e *registrypb.ServiceEndpoint, v string) { e.SpiffeId = v },
			"spiffe://td.example/ns/evil/sa/evil", "spiffe://td.example/ns/shop2/sa/cart", "spiffe://td.example/ns/sho/sa/cart", "spiffe://td.example/ns/shop", "spiffe://td.example/app",
			"spiffe://td.example/x/ns/shop/sa/cart", "spiffe://other.example/ns/shop/sa/cart", "spiffe://td.example.evil/ns/shop/sa/cart", "spiffe://td.example/NS/shop/sa/cart", "spiffe://td.example/ns/Shop/sa/cart")},
		"weight":              {free: "a share among the service's own rows"},
		"weightless":          {free: "see weight"},
		"locality":            {free: "a preference among the service's own rows"},
		"metadata":            {free: "is matched by routes of the service alone"},
		"health":              {free: "what is not known is not healthy (TestEndpointOfNewerVersion)"},
		"health_check_mode":   {free: "is read by the pod's own node alone"},
		"container_metadata":  {free: "is read by the pod's own node alone"},
		"kubernetes_metadata": {free: "node_name is held against a writer whose identity names a node (server.TestNodeWritesItsOwn); the rest is for people"},
		"stated":              {free: "is compared with statements of the same node alone (TestStatements)"},
	}
	if _, why := RowFault(goodRow()); why != "" {
		t.Fatal(why)
	}
	all := goodRow().ProtoReflect().Descriptor().Fields()
	for i := range all.Len() {
		name := protoreflect.FullName(all.Get(i).Name())
		f, there := fields[name]
		if !there || (f.free == "") == (len(f.bad) == 0) {
			t.Errorf("field %s: say in the table what of it is refused, or why nothing is", name)
		}
		for text, make := range f.bad {
			e := goodRow()
			make(e)
			got, why := RowFault(e)
			if got == NoFault {
				got, why = IdentityFault(cart, domain, e)
			}
			if got != f.want || why == "" {
				t.Errorf("%s %q: %q %q, want %q", name, text, got, why, f.want)
			}
			if _, err := Endpoint(cart, domain, e); err == nil { // at the node, which judges by itself
				t.Errorf("%s %q: the node believes it", name, text)
			}
		}
	}
	if all.Len() != len(fields) {
		t.Errorf("%d fields in the table, a row has %d", len(fields), all.Len())
	}
	for text, tt := range map[string]struct {
		make func(*registrypb.ServiceEndpoint)
		want Fault
	}{
		"256 ports":             {func(e *registrypb.ServiceEndpoint) { ports(e, model.MaxPorts, 1000) }, NoFault},
		"257 ports":             {func(e *registrypb.ServiceEndpoint) { ports(e, model.MaxPorts+1, 1000) }, ManyPorts},
		"one port, 300 times":   {func(e *registrypb.ServiceEndpoint) { e.Ports = slices.Repeat([]uint32{8080, 9000}, 150) }, ManyPorts},
		"a UDP port, 300 times": {func(e *registrypb.ServiceEndpoint) { e.UdpPorts = slices.Repeat([]uint32{8080}, 300) }, ManyPorts},
		"the proxy port alone":  {func(e *registrypb.ServiceEndpoint) { ports(e, 1, model.PortProxy) }, OwnPorts},
		"the mesh's own, and twice": {func(e *registrypb.ServiceEndpoint) {
			ports(e, 2, model.PortProxy)
			e.Ports = append(e.Ports, model.PortRaw)
		}, OwnPorts},
		"the mesh's own and one": {func(e *registrypb.ServiceEndpoint) { ports(e, 3, model.PortProxy) }, NoFault}, // contract 1.3: the port goes, the pod stays
	} {
		e := goodRow()
		tt.make(e)
		if got, why := RowFault(e); got != tt.want {
			t.Errorf("%s: %q %q, want %q", text, got, why, tt.want)
		}
	}
	for p := uint32(0); p <= 65535; p++ { // whatever the mesh's own are
		if model.ReservedPort(uint16(p)) {
			e := goodRow()
			ports(e, 1, p)
			if got, _ := RowFault(e); got != OwnPorts {
				t.Errorf("port %d alone: %q", p, got)
			}
		}
	}
}

// TestAddresses: an address is judged by what it is, however it is spelled.
func TestAddresses(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 1))
	judge := func(text string, bad bool) {
		t.Helper()
		e := goodRow()
		e.Ip = text
		if f, why := RowFault(e); (f != NoFault) != bad {
			t.Fatalf("%s: %q %q, want it refused: %t", text, f, why, bad)
		}
	}
	in := func(prefix string) netip.Addr {
		p := netip.MustParsePrefix(prefix)
		b := p.Addr().AsSlice()
		for i := p.Bits(); i < len(b)*8; i++ {
			if r.IntN(2) == 1 {
				b[i/8] |= 0x80 >> (i % 8)
			}
		}
		a, _ := netip.AddrFromSlice(b)
		return a
	}
	spellings := func(a netip.Addr) []string {
		out := []string{a.String(), a.StringExpanded()}
		if a.Is4() {
			b := a.As4()
			out = append(out, "::ffff:"+a.String(), fmt.Sprintf("::ffff:%x:%x", binary.BigEndian.Uint16(b[:]), binary.BigEndian.Uint16(b[2:])),
				netip.AddrFrom16(a.As16()).StringExpanded())
		}
		return out
	}
	for range 300 {
		for prefix, bad := range map[string]bool{
			"127.0.0.0/8": true, "169.254.0.0/16": true, "224.0.0.0/4": true, "0.0.0.0/8": true, "fe80::/10": true, "ff00::/8": true, "::/96": true,
			"10.0.0.0/8": false, "172.16.0.0/12": false, "100.64.0.0/10": false, "198.51.100.0/24": false, "126.0.0.0/8": false, "128.0.0.0/8": false,
			"240.0.0.0/5": false, "fd00::/8": false, "2001:db8::/32": false, "fec0::/10": false,
		} {
			for _, text := range spellings(in(prefix)) {
				judge(text, bad)
			}
		}
	}
}

// TestIdentityForms: which identities a form lets rows name, and which forms are none.
func TestIdentityForms(t *testing.T) {
	for _, tt := range []struct {
		form, id string
		want     bool
	}{
		{"/app", "spiffe://td.example/app", true},
		{"/app", "spiffe://td.example/app/x", false},
		{"/app/*", "spiffe://td.example/app/x", true},
		{"/app/*", "spiffe://td.example/app/x/y", true},
		{"/app/*", "spiffe://td.example/app", false},
		{"/app/*", "spiffe://td.example/application", false},
		{"/app/*", "spiffe://other.example/app/x", false},
		{"spiffe://other.example/ns/{namespace}/*", "spiffe://other.example/ns/shop/sa/cart", true},
		{"spiffe://other.example/ns/{namespace}/*", "spiffe://other.example/ns/evil/sa/cart", false},
		{"/team/{namespace}", "spiffe://td.example/team/shop", true},
		{"/team/{namespace}", "spiffe://td.example/team/shop/x", false},
		{"/ns/evil/*", "spiffe://td.example/ns/evil/sa/x", true}, // it is what was asked for
	} {
		if err := CheckIdentityForm(tt.form); err != nil {
			t.Errorf("%s: %v", tt.form, err)
		}
		e := goodRow()
		e.SpiffeId = tt.id
		f, _ := IdentityFault(cart, domain, e, "/no/other", tt.form)
		if _, err := Endpoint(cart, domain, e, "/no/other", tt.form); (f == NoFault) != tt.want || (err == nil) != tt.want {
			t.Errorf("%s by %s: %q, %v, want %t", tt.id, tt.form, f, err, tt.want)
		}
	}
	for _, form := range []string{"", "*", "/", "/*", "app", "spiffe://td.example", "spiffe://td.example/*", "/a*", "/a/*/b", "/a//b", "https://x/y", "/{node}", "/a/../b", "/ns/{namespace}/*/*"} {
		if CheckIdentityForm(form) == nil {
			t.Errorf("%q is taken", form)
		}
	}
	for _, form := range []string{"", "/node", "/node/{node}/{node}", "{node}", "/node/{node}/*", "spiffe://{node}", "/node/{namespace}/{node}"} {
		if CheckNodeForm(form) == nil {
			t.Errorf("%q is taken as a node's", form)
		}
	}
}

// TestNodeForms: a node's identity names that node and no other, and another identity none.
func TestNodeForms(t *testing.T) {
	for _, form := range []string{"/node/{node}", "/ns/aether-system/sa/aether-agent/node/{node}", "spiffe://nodes.example/{node}/agent", "/n-{node}-x"} {
		if err := CheckNodeForm(form); err != nil {
			t.Errorf("%s: %v", form, err)
			continue
		}
		for _, node := range []string{"a", "node-7", "ip-10-0-0-1.eu-west-1.compute.internal", "x-x", "node"} {
			id, err := NodeID(form, domain, node)
			if err != nil {
				t.Errorf("%s of %s: %v", form, node, err)
				continue
			}
			if got, ok := NodeOf(id, domain, form); !ok || got != node {
				t.Errorf("%s by %s is of %q, %t, want %s", id, form, got, ok, node)
			}
		}
		for _, node := range []string{"", "a/b", "../x", "a b", "nöde", "%61"} {
			if id, err := NodeID(form, domain, node); err == nil {
				t.Errorf("%s of %q is %s", form, node, id)
			}
		}
	}
	for _, text := range []string{"spiffe://td.example/node", "spiffe://td.example/node/a/b", "spiffe://other.example/node/a", "spiffe://td.example/x/node/a", "spiffe://td.example/nodes/a"} {
		id, err := spiffeid.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if node, ok := NodeOf(id, domain, "/node/{node}"); ok {
			t.Errorf("%s is of node %q", text, node)
		}
	}
}
