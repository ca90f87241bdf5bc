package registrypb

import (
	"maps"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// wire writes a message by field numbers alone.
type wire []byte

func (w wire) num(n protowire.Number, v uint64) wire {
	return protowire.AppendVarint(protowire.AppendTag(w, n, protowire.VarintType), v)
}

func (w wire) str(n protowire.Number, v string) wire {
	return protowire.AppendString(protowire.AppendTag(w, n, protowire.BytesType), v)
}

func (w wire) msg(n protowire.Number, v wire) wire {
	return protowire.AppendBytes(protowire.AppendTag(w, n, protowire.BytesType), v)
}

// entry of a map.
func (w wire) entry(n protowire.Number, key, value wire) wire {
	return w.msg(n, append(slices.Clone(key), value...))
}

// packed numbers.
func (w wire) packed(n protowire.Number, vs ...uint64) wire {
	var p wire
	for _, v := range vs {
		p = protowire.AppendVarint(p, v)
	}
	return w.msg(n, p)
}

// row is a ServiceEndpoint with every field of contract 9.2, and what it says.
func rowBytes() (wire, *ServiceEndpoint) {
	return wire{}.str(1, "10.1.0.7").str(2, "east").num(3, 8080).num(4, 512).
			msg(5, wire{}.str(1, "eu").str(2, "eu-1")).
			entry(6, wire{}.str(1, "version"), wire{}.str(2, "2")).
			msg(7, wire{}.str(1, "abc").str(2, "/run/netns/x")).
			msg(8, wire{}.str(1, "shop").str(2, "cart-1").str(3, "node1").str(5, "192.0.2.1")).
			num(9, 3).num(10, 2).packed(11, 8080, 9000).
			entry(12, wire{}.num(1, 8080), wire{}.num(2, 1)).entry(12, wire{}.num(1, 9000), wire{}.num(2, 2)),
		&ServiceEndpoint{
			Ip: "10.1.0.7", ClusterName: "east", Port: 8080, Weight: 512, Locality: &ServiceEndpoint_Locality{Region: "eu", Zone: "eu-1"},
			Metadata:           map[string]string{"version": "2"},
			ContainerMetadata:  &ServiceEndpoint_ContainerMetadata{ContainerId: "abc", NetworkNamespace: "/run/netns/x"},
			KubernetesMetadata: &ServiceEndpoint_KubernetesMetadata{Namespace: "shop", PodName: "cart-1", NodeName: "node1", NodeIp: "192.0.2.1"},
			Health:             ServiceEndpoint_DRAINING, HealthCheckMode: ServiceEndpoint_EDS, Ports: []uint32{8080, 9000},
			PortProtocols: map[uint32]PortProtocol{8080: PortProtocol_PORT_PROTOCOL_HTTP, 9000: PortProtocol_PORT_PROTOCOL_TCP},
		}
}

// The numbers of contract 9.2 and 9.7 mean what they say there, both ways: bytes made
// from them are read as that, and what is written holds those numbers.
func TestNumbers(t *testing.T) {
	row, endpoint := rowBytes()
	for _, tt := range []struct {
		name string
		wire wire
		want proto.Message
	}{
		{"ServiceEndpoint", row, endpoint},
		{"our own", wire{}.str(1, "10.1.0.7").str(5000, "spiffe://td/x").packed(5001, 53).num(5002, 1),
			&ServiceEndpoint{Ip: "10.1.0.7", SpiffeId: "spiffe://td/x", UdpPorts: []uint32{53}, Weightless: true}},
		{"Service", wire{}.str(1, "shop/cart").num(2, 3).entry(3, wire{}.str(1, "10.1.0.7"), wire{}.msg(2, row)),
			&Service{Name: "shop/cart", Protocol: Service_PROTOCOL_UDP, Endpoints: map[string]*ServiceEndpoint{"10.1.0.7": endpoint}}},
		{"ServiceConfigProjection", wire{}.str(1, "shop/cart").str(2, "c1").str(3, "7").
			msg(4, wire{}.msg(1, wire{}.str(1, "/a").str(2, "/b").str(3, "/c.*").msg(4, wire{}.str(1, "x").str(2, "y"))).
				msg(2, wire{}.str(1, "shop/web").str(2, "c2").num(3, 90)).
				msg(4, wire{}.msg(1, wire{}.str(1, "a").str(2, "1")).msg(2, wire{}.str(1, "b").str(2, "2")).str(3, "c").
					msg(4, wire{}.str(1, "d").str(2, "4")).msg(5, wire{}.str(1, "e").str(2, "5")).str(6, "f")).
				msg(5, wire{}.str(1, "https").str(2, "h").num(3, 443).num(4, 301).str(5, "t").str(6, "v").num(7, 80)).
				msg(6, wire{}.str(1, "h").str(2, "t").str(3, "v")).
				msg(7, wire{}.str(1, "f"))).
			msg(5, wire{}.str(1, "g")),
			&ServiceConfigProjection{Service: "shop/cart", OriginCluster: "c1", Version: "7", Routes: []*GammaRoute{{
				Matches:  []*GammaMatch{{Prefix: "/a", Exact: "/b", Regex: "/c.*", Headers: []*GammaHeaderMatch{{Name: "x", Value: "y"}}}},
				Backends: []*GammaBackend{{Service: "shop/web", Cluster: "c2", Weight: 90}},
				HeaderMutation: &GammaHeaderMutation{SetRequest: []*GammaHeaderKv{{Name: "a", Value: "1"}}, AddRequest: []*GammaHeaderKv{{Name: "b", Value: "2"}},
					RemoveRequest: []string{"c"}, SetResponse: []*GammaHeaderKv{{Name: "d", Value: "4"}}, AddResponse: []*GammaHeaderKv{{Name: "e", Value: "5"}}, RemoveResponse: []string{"f"}},
				Redirect:         &GammaRedirect{Scheme: "https", Hostname: "h", Port: 443, StatusCode: 301, PathType: "t", PathValue: "v", ListenerPort: 80},
				UrlRewrite:       &GammaUrlRewrite{Hostname: "h", PathType: "t", PathValue: "v"},
				ExtensionFilters: []*ExtensionFilter{{Name: "f"}},
			}}, ServiceFilter: &ExtensionFilter{Name: "g"}}},
		{"RegisterEndpoint", wire{}.str(1, "shop/cart").num(2, 2).msg(3, row),
			&RegisterEndpointRequest{ServiceName: "shop/cart", Protocol: Service_PROTOCOL_TCP, Endpoint: endpoint}},
		{"UnregisterEndpoint", wire{}.str(1, "shop/cart").str(2, "10.1.0.7").str(2, "10.1.0.8"),
			&UnregisterEndpointRequest{ServiceName: "shop/cart", Ips: []string{"10.1.0.7", "10.1.0.8"}}},
		{"WatchEndpoints", wire{}.str(1, "east").str(2, "node1").str(3, "v7").msg(4, wire{}.str(1, "shop/cart")),
			&WatchEndpointsRequest{ClusterName: "east", NodeName: "node1", LastVersion: "v7", Filter: &ServiceFilter{Services: []string{"shop/cart"}}}},
		{"an empty filter is no filter that is unset", wire{}.msg(4, wire{}), &WatchEndpointsRequest{Filter: &ServiceFilter{}}},
		{"an event", wire{}.num(1, 7).str(2, "shop/cart").num(3, 1).msg(4, row).str(5, "v8"),
			&WatchEndpointsResponse{Type: WatchEndpointsResponse_EVENT_TYPE_SERVICE_REMOVED, ServiceName: "shop/cart", Protocol: Service_PROTOCOL_HTTP, Endpoint: endpoint, Version: "v8"}},
		{"ListAllEndpoints", wire{}.num(1, 1), &ListAllEndpointsRequest{Protocol: Service_PROTOCOL_HTTP}},
		{"and its answer", wire{}.entry(1, wire{}.str(1, "shop/cart"), wire{}.msg(2, wire{}.msg(1, row))).str(2, "v7"),
			&ListAllEndpointsResponse{Services: map[string]*ServiceEndpoints{"shop/cart": {Endpoints: []*ServiceEndpoint{endpoint}}}, Version: "v7"}},
		{"ListAllConfig's answer", wire{}.msg(1, wire{}.str(1, "shop/cart")),
			&ListAllConfigResponse{Projections: []*ServiceConfigProjection{{Service: "shop/cart"}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.want.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(tt.wire, got); err != nil || !proto.Equal(got, tt.want) {
				t.Errorf("%v\nread as %v\nwant    %v", err, got, tt.want)
			}
			if b := got.ProtoReflect().GetUnknown(); len(b) > 0 {
				t.Errorf("not known: %x", []byte(b))
			}
			b, err := proto.MarshalOptions{Deterministic: true}.Marshal(tt.want)
			if err != nil || !slices.Equal(b, tt.wire) {
				t.Errorf("%v\nwritten as %x\nwant       %x", err, b, []byte(tt.wire))
			}
		})
	}
}

// Contract 9.2: a port's class has the number of the protocol that it is registered
// under; and these are the names that stand in the store's keys.
func TestEnums(t *testing.T) {
	if len(PortProtocol_name) != 4 || len(Service_Protocol_name) != 4 {
		t.Fatalf("%v, %v: a class without a protocol, or the reverse", PortProtocol_name, Service_Protocol_name)
	}
	for n, name := range PortProtocol_name {
		if "PORT_"+Service_Protocol_name[n] != name {
			t.Errorf("%d is %s as a class and %s as a protocol", n, name, Service_Protocol_name[n])
		}
	}
	for _, tt := range []struct{ got, want map[string]int32 }{
		{Service_Protocol_value, map[string]int32{"PROTOCOL_UNSPECIFIED": 0, "PROTOCOL_HTTP": 1, "PROTOCOL_TCP": 2, "PROTOCOL_UDP": 3}},
		{ServiceEndpoint_Health_value, map[string]int32{"HEALTH_UNSPECIFIED": 0, "HEALTHY": 1, "UNHEALTHY": 2, "DRAINING": 3}},
		{ServiceEndpoint_HealthCheckMode_value, map[string]int32{"HEALTH_CHECK_MODE_UNSPECIFIED": 0, "ACTIVE": 1, "EDS": 2}},
		{WatchEndpointsResponse_EventType_value, map[string]int32{
			"EVENT_TYPE_UNSPECIFIED": 0, "EVENT_TYPE_FULL_SNAPSHOT": 1, "EVENT_TYPE_ENDPOINT_ADDED": 2, "EVENT_TYPE_ENDPOINT_REMOVED": 3,
			"EVENT_TYPE_ENDPOINT_UPDATED": 4, "EVENT_TYPE_SNAPSHOT_COMPLETE": 5, "EVENT_TYPE_SERVICE_ADDED": 6, "EVENT_TYPE_SERVICE_REMOVED": 7,
		}},
	} {
		if !maps.Equal(tt.got, tt.want) {
			t.Errorf("%v, want %v", tt.got, tt.want)
		}
	}
	if got := RegistrarService_ServiceDesc.ServiceName; got != "aether.registrar.v1.RegistrarService" {
		t.Errorf("the service is %s", got)
	}
}

// What a newer version adds is kept as it came and changes nothing; a class, a health
// and an event that are not known are numbers still.
func TestNewer(t *testing.T) {
	row, endpoint := rowBytes()
	extra := wire{}.str(13, "of a newer version").num(6000, 7)
	got := &ServiceEndpoint{}
	if err := proto.Unmarshal(append(slices.Clone(row), extra...), got); err != nil {
		t.Fatal(err)
	}
	if string(got.ProtoReflect().GetUnknown()) != string(extra) {
		t.Errorf("kept %x, want %x", []byte(got.ProtoReflect().GetUnknown()), []byte(extra))
	}
	b, err := proto.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	again := &ServiceEndpoint{}
	if err := proto.Unmarshal(b, again); err != nil || !proto.Equal(again, got) {
		t.Errorf("%v: written again it is %v", err, again)
	}
	got.ProtoReflect().SetUnknown(nil)
	if !proto.Equal(got, endpoint) {
		t.Errorf("the rest is %v", got)
	}
	ev := &WatchEndpointsResponse{}
	if err := proto.Unmarshal(wire{}.num(1, 99).str(2, "shop/cart"), ev); err != nil || ev.GetType() != 99 || ev.GetServiceName() != "shop/cart" {
		t.Errorf("%v: %v", err, ev)
	}
}

// upstream are the fields of Aether's messages by number (contract 9.2, 9.7). It is written
// by hand from the contract.
var upstream = map[protoreflect.FullName][]protowire.Number{
	"aether.registry.v1.ServiceEndpoint":                    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
	"aether.registry.v1.ServiceEndpoint.Locality":           {1, 2},
	"aether.registry.v1.ServiceEndpoint.ContainerMetadata":  {1, 2},
	"aether.registry.v1.ServiceEndpoint.KubernetesMetadata": {1, 2, 3, 5},
	"aether.registry.v1.Service":                            {1, 2, 3},
	"aether.registry.v1.ServiceConfigProjection":            {1, 2, 3, 4, 5},
	"aether.registry.v1.GammaRoute":                         {1, 2, 3, 4, 5, 6, 7},
	"aether.registry.v1.GammaMatch":                         {1, 2, 3, 4},
	"aether.registry.v1.GammaHeaderMatch":                   {1, 2},
	"aether.registry.v1.GammaBackend":                       {1, 2, 3},
	"aether.registry.v1.GammaHeaderKv":                      {1, 2},
	"aether.registry.v1.GammaHeaderMutation":                {1, 2, 3, 4, 5, 6},
	"aether.registry.v1.GammaRedirect":                      {1, 2, 3, 4, 5, 6, 7},
	"aether.registry.v1.GammaUrlRewrite":                    {1, 2, 3},
	"aether.registry.v1.ExtensionFilter":                    {1, 2},
	"aether.registrar.v1.RegisterEndpointRequest":           {1, 2, 3},
	"aether.registrar.v1.RegisterEndpointResponse":          {},
	"aether.registrar.v1.UnregisterEndpointRequest":         {1, 2},
	"aether.registrar.v1.UnregisterEndpointResponse":        {},
	"aether.registrar.v1.WatchEndpointsRequest":             {1, 2, 3, 4},
	"aether.registrar.v1.ServiceFilter":                     {1},
	"aether.registrar.v1.WatchEndpointsResponse":            {1, 2, 3, 4, 5},
	"aether.registrar.v1.ListAllEndpointsRequest":           {1},
	"aether.registrar.v1.ListAllEndpointsResponse":          {1, 2},
	"aether.registrar.v1.ServiceEndpoints":                  {1},
	"aether.registrar.v1.ListAllConfigRequest":              {},
	"aether.registrar.v1.ListAllConfigResponse":             {1},
}

// Our own fields are at 5000 and above, in every message of every .proto file; below that
// a message has Aether's fields, all of them and no other.
func TestOwnNumbers(t *testing.T) {
	left := maps.Clone(upstream)
	var check func(ms protoreflect.MessageDescriptors)
	check = func(ms protoreflect.MessageDescriptors) {
		for i := range ms.Len() {
			m := ms.Get(i)
			if m.IsMapEntry() {
				continue
			}
			var got []protowire.Number
			for j := range m.Fields().Len() {
				if n := m.Fields().Get(j).Number(); n < 5000 {
					got = append(got, n)
				}
			}
			slices.Sort(got)
			if want, ok := left[m.FullName()]; !ok || !slices.Equal(got, want) {
				t.Errorf("%s has fields %v below 5000, Aether's has %v (there is one: %t)", m.FullName(), got, want, ok)
			}
			delete(left, m.FullName())
			check(m.Messages())
		}
	}
	check(File_controlplane_registrypb_registry_proto.Messages())
	check(File_controlplane_registrypb_registrar_proto.Messages())
	if len(left) > 0 {
		t.Errorf("messages that are nowhere: %v", slices.Sorted(maps.Keys(left)))
	}
	protos, err := filepath.Glob("*.proto")
	if err != nil || !slices.Equal(protos, []string{"registrar.proto", "registry.proto"}) {
		t.Errorf("%v, %v: have the messages of each file checked here", protos, err)
	}
	q := &WatchEndpointsRequest{} // what Aether may write under 5 one day is not our instance
	if err := proto.Unmarshal(wire{}.str(1, "east").str(5, "theirs"), q); err != nil || q.GetInstance() != "" {
		t.Errorf("%v: field 5 is read as instance %q", err, q.GetInstance())
	}
	if b, err := proto.Marshal(&WatchEndpointsRequest{Instance: "a"}); err != nil || string(b) != string(wire{}.str(5000, "a")) {
		t.Errorf("%x, %v: instance is not number 5000", b, err)
	}
}

// A reader that knows only contract 9.2's numbers reads the same row.
func TestOwnFieldsAreApart(t *testing.T) {
	theirs := map[protowire.Number]bool{}
	for _, n := range upstream["aether.registry.v1.ServiceEndpoint"] {
		theirs[n] = true
	}
	_, endpoint := rowBytes()
	mine := proto.Clone(endpoint).(*ServiceEndpoint)
	mine.SpiffeId, mine.UdpPorts, mine.Weightless = "spiffe://td/x", []uint32{9000}, true
	b, err := proto.Marshal(mine)
	if err != nil {
		t.Fatal(err)
	}
	// Their reader: what it does not know by number it leaves out.
	var kept wire
	for rest := b; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		n += protowire.ConsumeFieldValue(num, typ, rest[n:])
		if theirs[num] {
			kept = append(kept, rest[:n]...)
		}
		rest = rest[n:]
	}
	got := &ServiceEndpoint{}
	if err := proto.Unmarshal(kept, got); err != nil || !proto.Equal(got, endpoint) {
		t.Errorf("%v: another reader has %v", err, got)
	}
}
