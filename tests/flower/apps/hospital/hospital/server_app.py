import os

from fedloom.flower import server_app
from hospital.task import model, read

app = server_app(lambda context: model(), test=lambda context: read(os.environ["TEST_DATA"]))
