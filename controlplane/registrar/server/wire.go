package server

import (
	"fmt"
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto" // and so registers it
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
)

// Numbers of WatchEndpointsResponse's fields (contract 9.7).
const (
	fieldType     = 1
	fieldService  = 2
	fieldProtocol = 3
	fieldEndpoint = 4
	fieldVersion  = 5
	fieldSince    = 5000
)

type (
	eventType = registrypb.WatchEndpointsResponse_EventType
	protocol  = registrypb.Service_Protocol
)

const (
	fullSnapshot     = registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT
	endpointAdded    = registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_ADDED
	endpointRemoved  = registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_REMOVED
	endpointUpdated  = registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_UPDATED
	snapshotComplete = registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE
	serviceAdded     = registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_ADDED
	serviceRemoved   = registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_REMOVED
)

// frame is a WatchEndpointsResponse in parts that are encoded already. Fields of a
// message may stand in any order and anywhere, so the part that is a row's own (its
// service and endpoint) is encoded once and sent to everybody.
type frame struct{ parts [3]mem.Buffer }

// codec is gRPC's for protobuf, that sends frames as they are.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(protocodec.Name)} }

// Marshal is encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(*frame)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	out := make(mem.BufferSlice, 0, len(f.parts))
	for _, p := range f.parts {
		if p != nil {
			out = append(out, p)
		}
	}
	return out, nil
}

// heads are type and protocol of an event, by both.
var heads = func() (h [8][4]mem.Buffer) {
	for t := range h {
		for p := range h[t] {
			h[t][p] = newHead(eventType(t), protocol(p))
		}
	}
	return h
}()

func newHead(t eventType, p protocol) mem.Buffer {
	b := protowire.AppendTag(nil, fieldType, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(t))
	if p != 0 {
		b = protowire.AppendTag(b, fieldProtocol, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(p))
	}
	return mem.SliceBuffer(b)
}

func head(t eventType, p protocol) mem.Buffer {
	if p >= 0 && int(p) < len(heads[0]) {
		return heads[t][p]
	}
	return newHead(t, p)
}

func versionPart(v string) mem.Buffer { return stringPart(fieldVersion, v) }

func stringPart(n protowire.Number, v string) mem.Buffer {
	return mem.SliceBuffer(protowire.AppendString(protowire.AppendTag(nil, n, protowire.BytesType), v))
}

func serviceField(service string) []byte {
	b := protowire.AppendTag(make([]byte, 0, len(service)+3), fieldService, protowire.BytesType)
	return protowire.AppendString(b, service)
}

// encode makes a row of what a store, or a node, says. Unknown fields of a newer
// writer are kept.
func encode(r registry.Row) (*row, error) {
	for _, v := range []string{r.Service.Namespace, r.Service.Name, r.Region, r.Cluster, r.IP} {
		if !utf8.ValidString(v) {
			return nil, fmt.Errorf("%q in its key is no UTF-8", v)
		}
	}
	out, err := encodeIn(r.Service.String(), r.Region, r.Cluster, r.Protocol, r.IP, r.Endpoint)
	if err != nil {
		return nil, err
	}
	if n := out.body.Len(); n > maxStoredBytes {
		return nil, fmt.Errorf("it has %d bytes, more than %d: give it less metadata", n, maxStoredBytes)
	}
	return out, nil
}

func encodeIn(service, region, cluster string, p protocol, ip string, e *registrypb.ServiceEndpoint) (*row, error) {
	size := proto.Size(e)
	name := serviceField(service)
	b := make([]byte, 0, len(name)+size+protowire.SizeTag(fieldEndpoint)+protowire.SizeBytes(size))
	b = append(b, name...)
	b = protowire.AppendTag(b, fieldEndpoint, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	at := len(b)
	b, err := proto.MarshalOptions{Deterministic: true, UseCachedSize: true}.MarshalAppend(b, e)
	if err != nil {
		return nil, err
	}
	out := &row{rowKey: rowKey{ip, intern(region), intern(cluster), p}, body: mem.SliceBuffer(b), endpoint: b[at:]}
	said := registry.StatementOf(e)
	out.node, out.stated = intern(e.GetKubernetesMetadata().GetNodeName()), said.Stated
	out.sum = sumOf(service, out.region, out.cluster, out.protocol.String(), out.ip, string(out.endpoint))
	return out, nil
}

// removal is the part of an ENDPOINT_REMOVED that tells which row it was: clients of
// several clusters need more than the address.
func removal(service string, k rowKey) mem.Buffer {
	b := serviceField(service)
	e := &registrypb.ServiceEndpoint{Ip: k.ip, ClusterName: k.cluster}
	if k.region != "" {
		e.Locality = &registrypb.ServiceEndpoint_Locality{Region: k.region}
	}
	enc, err := proto.Marshal(e)
	if err != nil {
		panic(err) // its strings were seen by encode
	}
	b = protowire.AppendTag(b, fieldEndpoint, protowire.BytesType)
	return mem.SliceBuffer(protowire.AppendBytes(b, enc))
}
